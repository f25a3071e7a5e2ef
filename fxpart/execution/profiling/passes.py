"""Running a program operator by operator and timing those that still need a measurement."""

import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_map

from fxpart.errors import CaptureError, one_line
from fxpart.execution.device import device_name
from fxpart.execution.profiling.steps import Step, as_captured, valid_region_arguments
from fxpart.execution.profiling.tensors import Given, made_value
from fxpart.execution.profiling.valid_arguments import bent_nodes, valid_arguments

__all__ = ["Call", "Measured", "Run", "measure", "measured_on", "plan_pass", "timed_call"]


# Which operators one pass over a program runs, and what must be made before each of them.


@dataclass(frozen=True, eq=False, slots=True)
class Run:
    """One operator that a pass runs."""

    step: Step
    is_measured: bool
    make: tuple[fx.Node, ...]
    """Inputs that no operator of the pass makes: results of skipped ones, weights, inputs."""
    dying: tuple[fx.Node, ...]
    """Nodes whose values no later operator of the pass reads; its own, when nobody does."""


def plan_pass(steps: list[Step], remaining: Mapping[str, int]) -> list[Run]:
    """Return the operators that the next pass runs, in order.

    Measured are the first of each signature, as many as the signature still needs. Run besides are
    those before the last of these whose results must be real, and measured besides, those so small
    that to make up a result is no less work, and leaves the caches in no state of a real run.
    """
    left = dict(remaining)
    chosen: list[tuple[Step, bool]] = []
    last = 0
    for step in steps:
        is_needed = left.get(step.signature, 0) > 0
        if is_needed:
            left[step.signature] -= 1
        if is_needed or step.is_small or step.is_exact:
            chosen.append((step, step.signature in left and (is_needed or step.is_small)))
            last = len(chosen) if is_needed else last
    chosen = chosen[:last]
    last_reader = {read: step.node for step, _ in chosen for read in step.node.all_input_nodes}
    there: set[fx.Node] = set()
    runs = []
    for step, is_measured in chosen:
        node = step.node
        read = node.all_input_nodes
        make = tuple(one for one in read if one not in there)
        there.update(make, (node,))
        dying = tuple(one for one in read if last_reader[one] is node)
        runs.append(Run(step, is_measured, make, dying if node in last_reader else (*dying, node)))
    return runs


# What operators were measured on, and the clock that fits it.

Call = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]
"""A function and what it is called with."""

_HEAD_START_CYCLES = 200_000
"""Clock cycles (about 0.1 ms) that a GPU waits while the host prepares an operator's launch."""


def measured_on(device: torch.device) -> str:
    """Return the device's name; of a CPU, with the threads that torch uses."""
    if device.type == "cpu":
        threads = torch.get_num_threads()
        return f"{device_name(device)}, {threads} thread{'s' if threads > 1 else ''}"
    return device_name(device)


def timed_call(device: torch.device, box: list[Call]) -> tuple[Any, float]:
    """Return what the one call in `box` returns, and its time in seconds; `box` is left empty.

    The box lets go of the arguments, so that what nobody else holds is freed within the time
    measured, as it is in a real run.

    On a GPU: the larger of the kernels' time, between two events that the host has queued before
    they run, and the host's time to launch them. A host that launches ahead hides the smaller.
    """
    if device.type == "cpu":
        call, args, kwargs = box.pop()
        begin = time.perf_counter()
        result = call(*args, **kwargs)
        del args, kwargs
        return result, time.perf_counter() - begin
    return _timed_on_gpu(device, box)


def _timed_on_gpu(device: torch.device, box: list[Call]) -> tuple[Any, float]:
    call, args, kwargs = box.pop()
    with torch.cuda.device(device):
        first, last = _event(), _event()
        torch.cuda.synchronize()
        torch.cuda._sleep(_HEAD_START_CYCLES)  # type: ignore[no-untyped-call]
        first.record()
        begin = time.perf_counter()
        result = call(*args, **kwargs)
        del args, kwargs
        launch_s = time.perf_counter() - begin
        last.record()
        torch.cuda.synchronize()
        return result, max(launch_s, first.elapsed_time(last) / 1e3)


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


Values = dict[fx.Node, Any]
"""Inputs, weights and results that are still to be read."""


@dataclass(eq=False, slots=True)
class Measured:
    """Times by signature, in the order of measurement, and how often anything was run."""

    seconds: dict[str, list[float]] = field(default_factory=dict)
    executed: int = 0


def measure(
    steps: list[Step], given: Given, runs: int, known: frozenset[str], deadline_s: float
) -> Measured:
    """Return the times of all signatures but the `known` ones, each of `runs` runs.

    Passes over the whole program are repeated. In each, an operator is run where its signature
    still needs a time, or its result must be a real one; else its result is made when it is read.
    From `deadline_s` on (of ``time.perf_counter``), only signatures without any time are run.

    Raises:
        CaptureError: for an operator that cannot be run on the device.

    """
    measured = Measured()
    remaining = {step.signature: runs for step in steps if step.signature not in known}
    devices = [given.device] if given.device.type == "cuda" else []
    with torch.no_grad(), torch.random.fork_rng(devices), warnings.catch_warnings():
        # Operators warn of values as they are made up here, and once for each of many runs.
        warnings.simplefilter("ignore")
        while any(remaining.values()):
            _one_pass(plan_pass(steps, remaining), given, measured, deadline_s)
            late = time.perf_counter() > deadline_s
            for name in remaining:
                left = runs - len(measured.seconds.get(name, ()))
                remaining[name] = 0 if late else max(0, left)
    return measured


def _one_pass(plan: list[Run], given: Given, measured: Measured, deadline_s: float) -> None:
    """Run what is planned. Little is done between two operators: it would empty the caches."""
    values: Values = {}
    if given.keep:
        for run in plan:
            _place(values, run.make, given, inputs_only=True)
    for run in plan:
        step = run.step
        times = measured.seconds.setdefault(step.signature, [])
        late = bool(times) and time.perf_counter() > deadline_s
        if late and not step.is_exact:
            # Its readers may still be run: a made result does for them.
            _place(values, (step.node,), given)
        else:
            seconds = _run(run, values, given)
            measured.executed += 1
            if run.is_measured and not late:
                times.append(seconds)
        for node in run.dying:
            values.pop(node, None)
        given.drop(run.dying)


def _run(run: Run, values: Values, given: Given) -> float:
    """Run one operator, keep its result in `values`, and return its time in seconds."""
    step = run.step
    call, node = step.node.target, step.node
    if not callable(call):
        raise CaptureError(f"operator {node.name} has no function to call: {call}")
    try:
        if run.make and _place(values, run.make, given) and not given.keep:
            given.evict()
        args = tuple([_value(argument, values) for argument in step.args])
        kwargs = {name: _value(argument, values) for name, argument in step.kwargs.items()}
        if step.needs_validity:
            bent = _valid(step, call, args, kwargs)
            _keep_bent(step, (args, kwargs), bent, values, given)
            args, kwargs = bent
            del bent
        for one in run.dying:
            values.pop(one, None)
        box = [(call, args, kwargs)]
        del args, kwargs
        result, seconds = timed_call(given.device, box)
        values[node] = as_captured(result, node.meta.get("val")) if step.is_region else result
        del result
    # An operator may be anyone's, and fail in any way.
    except Exception as error:
        raise CaptureError(
            f"operator {node.name} ({call}) cannot be measured on {given.device}:"
            f" {one_line(error)}; measure on another device, or use latency=roofline"
        ) from error
    return seconds


def _value(argument: Any, values: Values) -> Any:  # noqa: ANN401 - as torch types arguments
    if type(argument) is fx.Node:
        return values[argument]
    if type(argument) is list:
        return [_value(item, values) for item in argument]
    return argument


def _valid(
    step: Step, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if step.is_region:
        return valid_region_arguments(call, args), kwargs
    return valid_arguments(call, args, kwargs)


def _keep_bent(
    step: Step,
    before: tuple[Any, Any],
    after: tuple[Any, Any],
    values: Values,
    given: Given,
) -> None:
    """Keep indices that were made valid: later readers, the backward among them, see the same."""
    for node, tensor in bent_nodes((step.args, step.kwargs), before, after):
        values[node] = tensor
        given.replace(node, tensor)


def _place(
    values: Values, nodes: tuple[fx.Node, ...], given: Given, *, inputs_only: bool = False
) -> bool:
    """Make the values of `nodes` that are not there; return whether a weight was among them."""
    made = given.make(nodes)
    for node in nodes:
        if node in values:
            continue
        if node in given.likes:
            values[node] = given.value(node)
        elif not inputs_only:
            values[node] = tree_map(
                lambda like: made_value(like, given.device) if isinstance(like, Tensor) else like,
                node.meta.get("val"),
            )
    return made
