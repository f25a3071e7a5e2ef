"""`measure`: run a program operator by operator, and time those that still need a measurement."""

import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_map

from fxpart.errors import CaptureError, one_line
from fxpart.execution.device import device_name
from fxpart.execution.profiling.steps import Step, as_captured, valid_region_arguments
from fxpart.execution.profiling.tensors import Placeholders, made_value
from fxpart.execution.profiling.valid_arguments import changed_nodes, valid_arguments

__all__ = ["Call", "Measured", "Run", "measure", "measured_on"]


Call = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]
"""A function and its arguments."""

Values = dict[fx.Node, Any]
"""Inputs, weights and results that are still needed."""

_UNDISTURBED = 0.9
"""Least share of a call's time that its thread has the processor on an idle machine."""
_OWN_CLOCK_IS_FINE = time.get_clock_info("thread_time").resolution <= 1e-6
_HEAD_START_CYCLES = 200_000
"""Clock cycles (about 0.1 ms) that a GPU waits while the host prepares an operator's launch."""


# Operators run by one pass over a program.


@dataclass(frozen=True, eq=False, slots=True)
class Run:
    """One operator run by a pass."""

    step: Step
    is_measured: bool
    make: tuple[fx.Node, ...]
    """Operands not computed in the pass: results of skipped operators, weights, inputs."""
    dying: tuple[fx.Node, ...]
    """Nodes, possibly itself, whose values no later operator of the pass reads."""


def _plan_pass(steps: list[Step], remaining: Mapping[str, int]) -> list[Run]:
    """Return the operators of the next pass, in order.

    The first operators of each signature are measured, as many as the signature still needs. Up to
    the last of these, operators whose results must be real are also run, and small ones are both
    run and measured: making up their results takes no less time, and would leave the caches in
    another state than a real run.
    """
    still_needed = dict(remaining)
    chosen: list[tuple[Step, bool]] = []
    last = 0
    for step in steps:
        is_needed = still_needed.get(step.signature, 0) > 0
        if is_needed:
            still_needed[step.signature] -= 1
        if is_needed or step.is_small or step.is_exact:
            chosen.append((step, step.signature in still_needed and (is_needed or step.is_small)))
            last = len(chosen) if is_needed else last
    chosen = chosen[:last]
    last_reader = {read: step.node for step, _ in chosen for read in step.node.all_input_nodes}
    available: set[fx.Node] = set()
    runs = []
    for step, is_measured in chosen:
        node = step.node
        operands = node.all_input_nodes
        make = tuple(operand for operand in operands if operand not in available)
        available.update(make, (node,))
        dying = tuple(operand for operand in operands if last_reader[operand] is node)
        runs.append(Run(step, is_measured, make, dying if node in last_reader else (*dying, node)))
    return runs


# Timed calls.


def measured_on(device: torch.device) -> str:
    """Return the device's name and, for a CPU, the number of torch's threads."""
    if device.type == "cpu":
        threads = torch.get_num_threads()
        return f"{device_name(device)}, {threads} thread{'s' if threads > 1 else ''}"
    return device_name(device)


class Timed(NamedTuple):
    """A timed call."""

    result: Any
    seconds: float
    """The time that counts."""
    taken_s: float
    """Wall-clock time."""
    lost_s: float
    """Time for which other work had the processor, as far as the clocks show."""


def _timed_call(device: torch.device, box: list[Call]) -> Timed:
    """Return the one call in `box` with its result and time; empties `box`.

    On a CPU, wall and thread clocks are compared. If this thread had the processor for much less
    than the call took, other work had it, and the thread's own time counts, as on an idle machine.
    With several threads, the thread clock only shows the loss, since it excludes the others' work.

    The call is removed from the box so that arguments without another reference are freed within
    the measured time, as in a real run.

    On a GPU: the larger of the kernels' time, between two events queued before the kernels run, and
    the host's time to launch them. A host that launches ahead hides the smaller.
    """
    if device.type == "cpu":
        call, args, kwargs = box.pop()
        began_own = time.thread_time()
        begin = time.perf_counter()
        result = call(*args, **kwargs)
        del args, kwargs
        taken_s = time.perf_counter() - begin
        own_s = time.thread_time() - began_own
        if _OWN_CLOCK_IS_FINE and own_s < _UNDISTURBED * taken_s:
            alone = torch.get_num_threads() == 1
            return Timed(result, own_s if alone else taken_s, taken_s, taken_s - own_s)
        return Timed(result, taken_s, taken_s, 0.0)
    result, seconds = _timed_on_gpu(device, box)
    return Timed(result, seconds, seconds, 0.0)


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


# Passes over a program.


@dataclass(eq=False, slots=True)
class Measured:
    """Times by signature in order of measurement, and the number of operators run."""

    seconds: dict[str, list[float]] = field(default_factory=dict)
    executed: int = 0
    taken_s: float = 0.0
    """Total wall-clock time of all calls."""
    lost_s: float = 0.0
    """Part of it for which other work had the processor."""


def measure(
    steps: list[Step],
    placeholders: Placeholders,
    runs: int,
    known: frozenset[str],
    deadline_s: float,
) -> Measured:
    """Return `runs` times of every signature except the `known` ones.

    Each pass over the program runs the operators whose signature still needs a time or whose result
    must be real; other results are made up when they are read. From `deadline_s` on (of
    ``time.perf_counter``), only signatures without any time are run.

    Raises:
        CaptureError: if an operator cannot be run on the device.

    """
    measured = Measured()
    remaining = {step.signature: runs for step in steps if step.signature not in known}
    devices = [placeholders.device] if placeholders.device.type == "cuda" else []
    with torch.no_grad(), torch.random.fork_rng(devices), warnings.catch_warnings():
        # Operators warn about made-up values in every run.
        warnings.simplefilter("ignore")
        while any(remaining.values()):
            _one_pass(_plan_pass(steps, remaining), placeholders, measured, deadline_s)
            late = time.perf_counter() > deadline_s
            for name in remaining:
                missing_runs = runs - len(measured.seconds.get(name, ()))
                remaining[name] = 0 if late else max(0, missing_runs)
    return measured


def _one_pass(
    plan: list[Run], placeholders: Placeholders, measured: Measured, deadline_s: float
) -> None:
    """Run the plan with little work between operators, which would evict cached data."""
    values: Values = {}
    if placeholders.keep:
        for run in plan:
            _make_values(values, run.make, placeholders, inputs_only=True)
    for run in plan:
        step = run.step
        times = measured.seconds.setdefault(step.signature, [])
        late = bool(times) and time.perf_counter() > deadline_s
        if late and not step.is_exact:
            # Its readers may still be run on a made-up result.
            _make_values(values, (step.node,), placeholders)
        else:
            timed = _run(run, values, placeholders)
            measured.executed += 1
            measured.taken_s += timed.taken_s
            measured.lost_s += timed.lost_s
            if run.is_measured and not late:
                times.append(timed.seconds)
        for node in run.dying:
            values.pop(node, None)
        placeholders.drop(run.dying)


def _run(run: Run, values: Values, placeholders: Placeholders) -> Timed:
    """Run one operator, store its result in `values`, and return its time without the result."""
    step = run.step
    call, node = step.node.target, step.node
    if not callable(call):
        raise CaptureError(f"operator {node.name} has no function to call: {call}")
    try:
        if run.make and _make_values(values, run.make, placeholders) and not placeholders.keep:
            placeholders.evict()
        args = tuple([_value(argument, values) for argument in step.args])
        kwargs = {name: _value(argument, values) for name, argument in step.kwargs.items()}
        if step.needs_validity:
            args, kwargs = _made_valid(step, call, (args, kwargs), values, placeholders)
        for dying in run.dying:
            values.pop(dying, None)
        box = [(call, args, kwargs)]
        del args, kwargs
        timed = _timed_call(placeholders.device, box)
        result, timed = timed.result, timed._replace(result=None)
        values[node] = as_captured(result, node.meta.get("val")) if step.is_region else result
        del result
    # A custom operator may raise anything.
    except Exception as error:
        raise CaptureError(
            f"operator {node.name} ({call}) cannot be measured on {placeholders.device}:"
            f" {one_line(error)}; measure on another device, or use latency=roofline"
        ) from error
    return timed


def _value(argument: Any, values: Values) -> Any:  # noqa: ANN401 - as torch types arguments
    if type(argument) is fx.Node:
        return values[argument]
    if type(argument) is list:
        return [_value(item, values) for item in argument]
    return argument


def _made_valid(
    step: Step,
    call: Callable[..., Any],
    arguments: tuple[tuple[Any, ...], dict[str, Any]],
    values: Values,
    placeholders: Placeholders,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return valid arguments, storing changed ones for later readers, including the backward."""
    args, kwargs = arguments
    if step.is_region:
        valid = valid_region_arguments(call, args), kwargs
    else:
        valid = valid_arguments(call, args, kwargs)
    for node, tensor in changed_nodes((step.args, step.kwargs), arguments, valid):
        values[node] = tensor
        placeholders.replace(node, tensor)
    return valid


def _make_values(
    values: Values,
    nodes: tuple[fx.Node, ...],
    placeholders: Placeholders,
    *,
    inputs_only: bool = False,
) -> bool:
    """Create the missing values of `nodes`; return whether a weight or input was created."""

    def made(like: object) -> object:
        return made_value(like, placeholders.device) if isinstance(like, Tensor) else like

    any_made = placeholders.make(nodes)
    for node in nodes:
        if node in values:
            continue
        if node in placeholders.likes:
            values[node] = placeholders.value(node)
        elif not inputs_only:
            values[node] = tree_map(made, node.meta.get("val"))
    return any_made
