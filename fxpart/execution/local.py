"""`run_local`: run and measure a placed model in this process, against the user's module."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import fx, nn
from torch.utils._pytree import tree_leaves

from fxpart.capture.live_bytes import LiveBytes, storage_sizes
from fxpart.core.assignment import Assignment
from fxpart.cost.evaluate import peak_bytes
from fxpart.cost.tables import memory_tables
from fxpart.errors import ExecutionError, FxpartError, SpecError, one_line, show_unequal_bytes
from fxpart.execution.backward_devices import BackwardDevices
from fxpart.execution.device import allocated_peaks, device_name, free_bytes, timed_in_turns
from fxpart.execution.outcome import (
    Outcome,
    agreement,
    step_outcome,
    trained_parameters,
    undoable,
)
from fxpart.execution.real_model import RealModel
from fxpart.execution.split.placement import split_by_assignment
from fxpart.execution.split_run import SplitRun, partition_weights, physical_devices, split_run

__all__ = ["LocalRun", "check_memory", "resident_storages", "run_local"]

_MOST_ROUNDS = 8
"""Rounds of replicas whose memory is counted."""


@dataclass(frozen=True, slots=True)
class LocalRun:
    """Measurements of a placed model that was run in this process."""

    runs_s: tuple[float, ...]
    """Seconds of each timed run of the split model."""
    unsplit_runs_s: tuple[float, ...]
    """The same for the unsplit graph, in alternation with the split one."""
    peak_bytes: tuple[int, ...]
    """Peak bytes of weights, inputs and live tensors on each logical device; received tensors are
    copies. Memory that kernels allocate internally does not count. In a backward pass, tensors that
    autograd holds until an operator's gradient formula finishes do: this can exceed the peak of a
    graph with one operator per call."""
    allocator_peak_bytes: tuple[int, ...]
    """Peak bytes of torch's allocator on each CUDA device during one run, weights included; empty
    on the CPU."""
    max_difference: float
    """Largest elementwise difference of the results from those of the module in eager mode; 0.0 if
    equal."""
    loss: float | None
    """Loss of a training step; None without training."""
    gradient_difference: float | None
    """Largest difference of a parameter's gradient from that of the module in eager mode, as a
    share of the elements around it; 0.0 if equal. None without training."""
    nan_elements: int
    """Number of NaN in results, loss and gradients, which are equal to any other NaN in their
    place."""
    device_name: str
    """Name of the processor or GPU."""
    threads: int
    """Number of torch's threads on the CPU."""

    @property
    def latency_s(self) -> float:
        """Median seconds of one input through the split model, its partitions one after another.

        In training, one step including the backward pass.
        """
        return statistics.median(self.runs_s)

    @property
    def unsplit_latency_s(self) -> float:
        """Median seconds of one input through the unsplit graph."""
        return statistics.median(self.unsplit_runs_s)

    @property
    def throughput_per_s(self) -> float:
        """Inputs per second: 1 / latency, since partitions run one after another."""
        return 1.0 / self.latency_s


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
    turns on the GPUs. With replicas, only the first input is timed, and memory is measured over the
    first rounds.

    A training step computes the forward, the loss (see `training_loss`) and the gradients of all
    parameters, leaving their ``grad`` unchanged. The gradient of a value with three or more readers
    is summed in the order in which they ran, so partitions that change that order may change
    gradients by rounding.

    Args:
        real: the model, whose `graph` the assignment places.
        assignment: the logical device of each operator.
        n_devices: number of logical devices, used or not.
        repeats: number of timed runs of the split model, and of the unsplit one.
        training: run training steps. A model with parts under ``no_grad`` must then have been
            exported with gradients, as `fxpart.capture.joint_capture` does.

    Raises:
        SpecError: if `repeats` is below 1, the assignment is of another graph or uses missing
            devices, or the tensors exceed the free memory.
        ExecutionError: if the model cannot be run, or the split model's results differ.

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
    # A model's code may raise anything.
    except Exception as error:
        raise ExecutionError(
            f"the split model cannot be run on {real.device}: {one_line(error)}; make"
            " model.batch_size or the model smaller if it lacks memory"
        ) from error


def _check(real: RealModel, assignment: Assignment, n_devices: int, repeats: int) -> None:
    if repeats < 1:
        raise SpecError(f"repeats={repeats} must be 1 or more: without a run nothing is measured")
    assignment.check_for(real.graph.n_ops, n_devices)


def check_memory(real: RealModel, *, training: bool) -> None:
    """Refuse a batch whose tensors do not fit, since the system might kill this process."""
    needed_bytes, available_bytes = _needed_bytes(real, training), free_bytes(real.device)
    if needed_bytes > available_bytes:
        subject = "a training step may take" if training else "running the model takes"
        takes, has = show_unequal_bytes(needed_bytes, available_bytes)
        raise SpecError(
            f"{subject} {takes} for tensors, and {real.device} has {has} left; set a smaller"
            " model.batch_size or model.seq_len, or plan without running it (execute=none)"
        )


def _needed_bytes(real: RealModel, training: bool) -> int:
    """Return the bytes of tensors other than weights; a rough upper bound for a training step."""
    graph = real.graph
    # The unsplit model's results and gradients are kept for the comparison.
    results = int(graph.value_bytes[graph.value_is_output].sum())
    if training:
        gradients = sum(p.nbytes for p in trained_parameters(real.module).values())
        # Forward values are freed while gradients are computed.
        return max(int(graph.value_alloc_bytes.sum()), gradients) + gradients + results
    single_device = np.zeros(graph.n_ops, dtype=np.int64)
    return (
        int(peak_bytes(memory_tables(graph), single_device, 1)[0])
        - graph.total_weight_bytes
        + results
    )


def _measured(
    real: RealModel,
    whole: fx.GraphModule,
    assignment: Assignment,
    *,
    n_devices: int,
    repeats: int,
    training: bool,
) -> LocalRun:
    """Return the measurements of `whole`, unsplit and split."""
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
    n_nan = reference.nan_elements
    del reference
    runs, unsplit_runs = timed_in_turns(
        lambda: work.outcome(step), lambda: work.outcome(unsplit), physical, repeats, restore
    )
    restore()
    return LocalRun(
        runs_s=runs,
        unsplit_runs_s=unsplit_runs,
        peak_bytes=peaks,
        allocator_peak_bytes=allocated,
        max_difference=difference,
        loss=loss,
        gradient_difference=gradient_difference,
        nan_elements=n_nan,
        device_name=device_name(real.device),
        threads=torch.get_num_threads(),
    )


@dataclass(frozen=True, eq=False, slots=True)
class _Work:
    """The work per input: a forward, or a training step."""

    training: bool
    parameters: dict[str, nn.Parameter]

    def outcome(self, forward: Callable[[], object], *, keep_results: bool = False) -> Outcome:
        """Return the outcome of the work, with `forward` as its forward pass."""
        if not self.training:
            return Outcome(forward(), None, None)
        return step_outcome(forward, self.parameters, keep_results=keep_results)

    def counted(self, run: SplitRun, inputs: Sequence[object], counter: LiveBytes) -> Outcome:
        """Return the outcome for a split model while `counter` counts bytes by device."""
        if not self.training:
            return Outcome(run.run(inputs, counter), None, None)
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
    """Return the peak bytes of each logical device in a run that copies between them."""
    inputs, homes_of = tree_leaves((real.args, real.kwargs)), assignment.devices_of_partition
    peaks = [0] * n_devices
    for index in range(min(assignment.rounds, _MOST_ROUNDS)):
        homes = [devices[index % len(devices)] for devices in homes_of]
        run = split_run(split, homes, (real.device,) * n_devices)
        restore()
        with LiveBytes(resident_storages(run, assignment, inputs, n_devices)) as counter:
            outcome = work.counted(run, inputs, counter)
        peaks = [max(pair) for pair in zip(peaks, counter.peak_bytes, strict=True)]
        # A copy is dense; kernels may sum it in another order than the strided original.
        agreement(outcome, reference)
    return tuple(peaks)


def resident_storages(
    run: SplitRun, assignment: Assignment, inputs: Sequence[Any], n_devices: int
) -> list[dict[int, int]]:
    """Return, per logical device, the bytes of each storage of weights and inputs, by address."""
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
