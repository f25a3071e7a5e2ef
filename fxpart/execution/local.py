"""`run_local`: run and measure a placed model in this process, against the user's module."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from fxpart.capture.training.loss import training_loss
from fxpart.core.assignment import Assignment
from fxpart.cost.evaluate import peak_bytes
from fxpart.cost.tables import memory_tables
from fxpart.errors import ExecutionError, FxpartError, SpecError, one_line, show_bytes
from fxpart.execution.backward_devices import BackwardDevices
from fxpart.execution.device import allocated_peaks, device_name, free_bytes, timed_in_turns
from fxpart.execution.difference import (
    gradient_share,
    largest_magnitude,
    max_difference,
    refuse_more,
    rounding,
)
from fxpart.execution.live_bytes import LiveBytes, storage_sizes
from fxpart.execution.real_model import RealModel
from fxpart.execution.split.placement import split_by_assignment
from fxpart.execution.split_run import SplitRun, partition_weights, physical_devices, split_run
from fxpart.execution.stage_shell import mutated_inputs

__all__ = [
    "LocalRun",
    "Outcome",
    "agreement",
    "check_memory",
    "resident_storages",
    "run_local",
    "step_outcome",
    "trained_parameters",
    "undoable",
]


_MOST_ROUNDS = 8
"""Rounds of replicas whose memory is counted."""


@dataclass(frozen=True, eq=False, slots=True)
class Outcome:
    """Results of a forward; loss and gradients of a training step."""

    results: Any
    """Results of the model, detached; None when a training step did not keep them."""
    loss: Tensor | None
    """None without training."""
    gradients: Mapping[str, Tensor] | None
    """By parameter, without those that the loss does not depend on. None without training."""


def trained_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that require gradients, each once, by its first name."""
    return {name: p for name, p in module.named_parameters() if p.requires_grad}


def _forward_outcome(forward: Callable[[], Any]) -> Outcome:
    """Return the results of `forward`, called in the caller's mode of autograd."""
    return Outcome(forward(), None, None)


def step_outcome(
    forward: Callable[[], Any],
    parameters: Mapping[str, nn.Parameter],
    *,
    keep_results: bool = False,
    loss_of: Callable[[Sequence[Tensor]], Tensor] = training_loss,
) -> Outcome:
    """Return the outcome of a training step: `forward`, loss, and gradients of `parameters`.

    The ``grad`` of every parameter stays as it is.

    Args:
        forward: returns the model's results, which are dropped before the backward.
        parameters: to compute gradients of.
        keep_results: keep the results, detached.
        loss_of: returns the loss of the flattened results.

    Raises:
        SpecError: when no result can have a loss.

    """
    with torch.enable_grad():
        results = forward()
        loss = loss_of([leaf for leaf in tree_leaves(results) if isinstance(leaf, Tensor)])
        kept = tree_map_only(Tensor, Tensor.detach, results) if keep_results else None
        del results
        # Not `backward`, which would add to the ``grad`` of the caller's weights.
        gradients = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
    pairs = zip(parameters, gradients, strict=True)
    return Outcome(kept, loss.detach(), {name: g for name, g in pairs if g is not None})


def agreement(outcome: Outcome, reference: Outcome) -> tuple[float, float | None]:
    """Return how far results and loss, and gradients, of a split model are from the unsplit one's.

    Results that `outcome` did not keep are not compared. Gradients are compared by
    `gradient_share`; None without training.

    Raises:
        ExecutionError: when either differs by more than sums in another order may.

    """
    with_results = outcome.results is not None or reference.loss is None
    computed = (outcome.results, outcome.loss) if with_results else outcome.loss
    wanted = (reference.results, reference.loss) if with_results else reference.loss
    difference = max_difference(computed, wanted)
    refuse_more("results", difference, rounding(wanted) * largest_magnitude(wanted))
    if reference.gradients is None:
        return difference, None
    share = gradient_share(outcome.gradients or {}, reference.gradients)
    allowed = rounding(list(reference.gradients.values()))
    refuse_more("gradients", share, allowed, " of their largest element")
    return difference, share


@dataclass(frozen=True, slots=True)
class LocalRun:
    """Measurements of a placed model that was run in this process."""

    latency_s: float
    """Median time of one input through the split model, its partitions one after another; in
    training, of a step with its backward."""
    runs_s: tuple[float, ...]
    """Each of the timed runs."""
    unsplit_latency_s: float
    """Median time of one input through the unsplit graph, timed in turns with the split one."""
    throughput_per_s: float
    """Inputs a second: 1 / latency, since partitions run one after another."""
    peak_bytes: tuple[int, ...]
    """Peak bytes of weights, inputs and live tensors on each logical device; received tensors are
    copies. Memory that kernels allocate for themselves does not count. In a backward, tensors that
    autograd keeps until an operator's gradient formula is done count: that can be more than in a
    graph with an operator for each call."""
    allocator_peak_bytes: tuple[int, ...]
    """Peak bytes of torch's allocator on each CUDA device during one run, weights included; empty
    on the CPU."""
    max_difference: float
    """Largest difference of any element of the results from those of the module itself, called
    eagerly; 0.0 when equal."""
    loss: float | None
    """Of a training step; None without training."""
    gradient_difference: float | None
    """Largest difference of a parameter's gradient from that of the module itself, as a share of
    its largest element; 0.0 when equal. None without training."""
    device_name: str
    """Name of the processor or GPU."""
    threads: int
    """Number of torch's threads on the CPU."""


def run_local(
    real: RealModel,
    assignment: Assignment,
    n_devices: int,
    *,
    repeats: int = 5,
    training: bool = False,
) -> LocalRun:
    """Return measurements of the model, split by `assignment` and run in this process.

    Partitions run one after another. On the CPU all logical devices are that CPU; on CUDA they take
    turns on the GPUs. With replicas, the first input is timed, and memory is that of the first
    rounds.

    A training step is forward, loss (see `training_loss`) and the gradients of all parameters,
    whose ``grad`` stays as it is. The gradient of a value with three or more readers is summed in
    the order in which they ran: where partitions change that order, gradients may differ by
    rounding.

    Args:
        real: the model; the assignment is of its `graph`.
        assignment: which operator is on which logical device.
        n_devices: number of logical devices, used or not.
        repeats: number of timed runs of the split model, and of the unsplit one.
        training: run training steps. A model with parts under ``no_grad`` must then have been
            exported with gradients, as `fxpart.capture.joint_capture` does.

    Raises:
        SpecError: for an assignment of another graph or of missing devices.
        ExecutionError: when the model cannot be run, or the split one computes something else.

    """
    _check(real, assignment, n_devices, repeats)
    check_memory(real, training=training)
    whole = real.program.module()
    try:
        with torch.set_grad_enabled(training):
            return _measured(
                real,
                whole,
                assignment,
                n_devices=n_devices,
                repeats=repeats,
                training=training,
            )
    except FxpartError:
        raise
    # The code of a model may fail in any way.
    except Exception as error:
        raise ExecutionError(
            f"the split model cannot be run on {real.device}: {one_line(error)}; make"
            " model.batch_size or the model smaller if it lacks memory"
        ) from error


def _check(real: RealModel, assignment: Assignment, n_devices: int, repeats: int) -> None:
    if repeats < 1:
        raise SpecError(f"repeats={repeats} must be 1 or more: without a run nothing is measured")
    if len(assignment.partition_of) != real.graph.n_ops:
        raise SpecError(
            f"the assignment places {len(assignment.partition_of)} operators, the model has"
            f" {real.graph.n_ops}; make it for the graph of this model"
        )
    used = [device for homes in assignment.devices_of_partition for device in homes]
    if max(used) >= n_devices or min(used) < 0:
        wrong = max(used) if max(used) >= n_devices else min(used)
        raise SpecError(
            f"the assignment uses device {wrong}, there are {n_devices}; make it for these devices"
        )


def check_memory(real: RealModel, *, training: bool) -> None:
    """Refuse a batch whose tensors do not fit: the system might kill this process."""
    needed, free = _needed_bytes(real, training), free_bytes(real.device)
    if needed > free:
        what = "a training step may take" if training else "running the model takes"
        raise SpecError(
            f"{what} {show_bytes(needed)} for tensors, and {real.device} has"
            f" {show_bytes(free)} left; set a smaller model.batch_size or model.seq_len, or"
            " plan without running it (execute=none)"
        )


def _needed_bytes(real: RealModel, training: bool) -> int:
    """Return the bytes of tensors beside weights; for a training step, roughly an upper bound."""
    graph = real.graph
    # Results and gradients of the unsplit model are kept for the comparison.
    results = int(graph.value_bytes[graph.value_is_output].sum())
    if training:
        gradients = sum(p.nbytes for p in trained_parameters(real.module).values())
        # Values of the forward are freed while gradients are computed.
        return max(int(graph.value_alloc_bytes.sum()), gradients) + gradients + results
    on_one = np.zeros(graph.n_ops, dtype=np.int64)
    return int(peak_bytes(memory_tables(graph), on_one, 1)[0]) - graph.total_weight_bytes + results


def _measured(
    real: RealModel,
    whole: fx.GraphModule,
    assignment: Assignment,
    *,
    n_devices: int,
    repeats: int,
    training: bool,
) -> LocalRun:
    """Return the measurements of `whole` and of its split."""
    work = _Work(training, trained_parameters(whole))
    split = split_by_assignment(whole, real.graph, assignment)

    def unsplit() -> object:
        return whole(*real.args, **real.kwargs)

    eager = _Work(training, trained_parameters(real.module))
    reference, restore = undoable(
        real,
        whole,
        lambda: eager.outcome(lambda: real.module(*real.args, **real.kwargs), keep_results=True),
    )
    peaks = _counted_peaks(
        real, split, assignment, n_devices, work=work, reference=reference, restore=restore
    )
    restore()
    step, physical = _step(real, split, assignment, n_devices)
    allocated = allocated_peaks(lambda: work.outcome(step), physical)
    restore()
    difference, gradient_difference = agreement(work.outcome(step, keep_results=True), reference)
    loss = None if reference.loss is None else float(reference.loss)
    del reference
    runs, unsplit_runs = timed_in_turns(
        lambda: work.outcome(step), lambda: work.outcome(unsplit), physical, repeats, restore
    )
    restore()
    latency = statistics.median(runs)
    return LocalRun(
        latency_s=latency,
        runs_s=runs,
        unsplit_latency_s=statistics.median(unsplit_runs),
        throughput_per_s=1.0 / latency,
        peak_bytes=peaks,
        allocator_peak_bytes=allocated,
        max_difference=difference,
        loss=loss,
        gradient_difference=gradient_difference,
        device_name=device_name(real.device),
        threads=torch.get_num_threads(),
    )


def undoable(
    real: RealModel, whole: fx.GraphModule, run: Callable[[], Outcome]
) -> tuple[Outcome, Callable[[], None]]:
    """Return the outcome of a run of the module, and a function that undoes what runs write.

    That is into inputs, as into a cache, and into buffers. What this run leaves as it was, a later
    one does too, so it is not kept: a buffer made by ``expand`` cannot even be written.
    """
    inputs = tree_leaves((real.args, real.kwargs))
    tensors = [*(inputs[at] for at in mutated_inputs(whole)), *real.module.buffers()]
    shared = {id(tensor) for tensor in tensors}
    # The program shares the module's, but for those that it keeps for itself.
    private = [buffer for buffer in whole.buffers() if id(buffer) not in shared]
    # On the host, where they count in no peak of a GPU.
    before = [(tensor, tensor.to("cpu", copy=True)) for tensor in (*tensors, *private)]
    outcome = run()
    written = [
        (tensor, values)
        for tensor, values in before
        if id(tensor) not in shared or not _is_same(tensor, values)
    ]
    del before

    def restore() -> None:
        for tensor, values in written:
            tensor.copy_(values)

    return outcome, restore


def _is_same(tensor: Tensor, values: Tensor) -> bool:
    with suppress(NotImplementedError):  # torch compares no sparse tensors
        return torch.equal(tensor.cpu(), values)
    return False


@dataclass(frozen=True, eq=False, slots=True)
class _Work:
    """The work on an input: a forward, or a training step."""

    training: bool
    parameters: dict[str, nn.Parameter]

    def outcome(self, forward: Callable[[], object], *, keep_results: bool = False) -> Outcome:
        """Return the outcome of the work around `forward`."""
        if not self.training:
            return _forward_outcome(forward)
        return step_outcome(forward, self.parameters, keep_results=keep_results)

    def counted(self, run: SplitRun, inputs: Sequence[object], counter: LiveBytes) -> Outcome:
        """Return the same for a split model, while `counter` counts bytes by device."""
        if not self.training:
            return _forward_outcome(lambda: run.run(inputs, counter))
        backward = BackwardDevices(counter)
        return step_outcome(
            lambda: run.run(inputs, counter, backward), self.parameters, loss_of=backward.loss
        )


def _counted_peaks(
    real: RealModel,
    split: fx.GraphModule,
    assignment: Assignment,
    n_devices: int,
    *,
    work: _Work,
    reference: Outcome,
    restore: Callable[[], None],
) -> tuple[int, ...]:
    """Return the peak bytes of each logical device, in a run that copies between them."""
    inputs, homes_of = tree_leaves((real.args, real.kwargs)), assignment.devices_of_partition
    peaks = [0] * n_devices
    for index in range(min(assignment.rounds, _MOST_ROUNDS)):
        homes = [devices[index % len(devices)] for devices in homes_of]
        run = split_run(split, homes, (real.device,) * n_devices)
        restore()
        with LiveBytes(resident_storages(run, assignment, inputs, n_devices)) as counter:
            outcome = work.counted(run, inputs, counter)
        peaks = [max(pair) for pair in zip(peaks, counter.peak_bytes, strict=True)]
        # A copy is dense, and kernels may sum it in another order than the strided original.
        agreement(outcome, reference)
    return tuple(peaks)


def resident_storages(
    run: SplitRun, assignment: Assignment, inputs: Sequence[Any], n_devices: int
) -> list[dict[int, int]]:
    """Return the storages of weights and inputs on each logical device, with their bytes."""
    weights, read = partition_weights(run.flat), run.inputs_read(inputs, n_devices)
    return [
        storage_sizes([*read[d], *(t for p in assignment.holds(d) for t in weights[int(p)])])
        for d in range(n_devices)
    ]


def _step(
    real: RealModel, split: fx.GraphModule, assignment: Assignment, n_devices: int
) -> tuple[Callable[[], object], tuple[torch.device, ...]]:
    """Return a function that runs the split model once, and the physical devices."""
    physical = physical_devices(real.device, n_devices)
    homes = [devices[0] for devices in assignment.devices_of_partition]
    if all(physical[home] == real.device for home in homes):
        return lambda: split(*real.args, **real.kwargs), physical
    inputs, run = tree_leaves((real.args, real.kwargs)), split_run(split, homes, physical)
    return lambda: run.run(inputs), physical
