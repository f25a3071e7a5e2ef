"""What an experiment comes to: a placement, its cost, and what was asked for beside it."""

from dataclasses import dataclass
from functools import cached_property

from fxpart.capture.captured import CapturedGraph
from fxpart.core.assignment import Assignment
from fxpart.cost.device_memory import DeviceMemory
from fxpart.cost.evaluation import DeviceUse, Evaluation
from fxpart.cost.peak_tensors import DevicePeak, device_peaks
from fxpart.cost.prefetch import ShardedStep
from fxpart.cost.problem import Problem
from fxpart.placement.offload.plan import Offloaded
from fxpart.placement.optimal.mode import Progress
from fxpart.schedule import ScheduleResult
from runner.experiment.batch_report import BatchReport
from runner.experiment.generation import Generation
from runner.experiment.measured import Measured
from runner.experiment.replicas import Replicas
from runner.experiment.serving_table import ServingRow
from runner.experiment.subject import Subject
from runner.experiment.tensor_split import TensorSplit
from runner.experiment.whole_modules import WholeModules

LARGEST = 100
"""Tensors of each device that are listed at its peak."""


# Without slots, for the cached property.
@dataclass(frozen=True, eq=False)
class Result:
    """What an experiment found."""

    subject: Subject
    problem: Problem
    assignment: Assignment
    evaluation: Evaluation
    partition_s: float
    """Time that the mode took."""
    batch_size: int = 1
    """Examples in one input, of all replicas together."""
    tokens: int | None = None
    """In an example of a model of texts."""
    price_per_hour: float | None = None
    """Of all devices, in USD, where it is known."""
    step: str | None = None
    """Which step of serving, one of `fxpart.core.phases.CACHED_STEPS`."""
    measured_on: str | None = None
    """The device whose operators were measured, where times come from measurements."""
    schedule: ScheduleResult | None = None
    """The pipeline that was asked for."""
    replicas: Replicas | None = None
    """What data parallelism costs; `evaluation` is of one replica, sums included."""
    device_memory: tuple[DeviceMemory, ...] = ()
    """What each device needs, beside tensors too."""
    batches: BatchReport | None = None
    """The plan at other sizes."""
    measured: Measured | None = None
    """What was measured when the plan was carried out."""
    whole: WholeModules | None = None
    """Beside a search: the best plan that keeps modules whole."""
    subject_line: str = ""
    """What was planned, as `runner.experiment.subject_line` has it."""
    shards: ShardedStep | None = None
    """What ZeRO costs; its collectives are in the times of `evaluation`."""
    split: TensorSplit | None = None
    """What tensor parallelism costs; every device of `evaluation` then stands for a group."""
    curve: tuple[Progress, ...] = ()
    """How `mode=optimal` went on."""
    offloaded: Offloaded | None = None
    """Which weights lie in tiers beside the devices, where the devices do not hold all."""
    generation: Generation | None = None
    """Of ``phase=generate``: what prompts and decode take; `evaluation` is of the last decode."""
    other_sizes: tuple[ServingRow, ...] = ()
    """The same of each pair in ``serving_sweep``."""
    times_note: str = ""
    """Where the times come from, if a plan that is carried out here has them from elsewhere."""

    @cached_property
    def peaks(self) -> tuple[DevicePeak, ...]:
        """Where each device's memory is fullest, with the `LARGEST` tensors there."""
        return device_peaks(self.problem, self.assignment, LARGEST)

    @property
    def n_devices(self) -> int:
        """How many rows of `evaluation` are devices; a tier that computes comes after them."""
        return len(self.offloaded.devices) if self.offloaded else len(self.evaluation.devices)

    @property
    def device_uses(self) -> tuple[DeviceUse, ...]:
        """What each device holds and does."""
        return self.evaluation.devices[: self.n_devices]

    @property
    def peak_bytes(self) -> int:
        """The largest peak of any device."""
        return max(use.peak_bytes for use in self.device_uses)

    @property
    def device_peaks(self) -> tuple[DevicePeak, ...]:
        """Those of `peaks` that are of devices; all where only a tier computes."""
        of_devices = tuple(peak for peak in self.peaks if peak.device < self.n_devices)
        return of_devices or self.peaks

    @property
    def copy_rooms(self) -> dict[int, int]:
        """Bytes of each device that are kept for copies from tiers, by logical id."""
        if self.offloaded is None:
            return {}
        peaks = {peak.device: peak.bytes for peak in self.device_peaks}
        return {
            use.logical_id: use.peak_bytes - peaks[use.logical_id]
            for use in self.device_uses
            if use.logical_id in peaks
        }

    @property
    def device_needs(self) -> tuple[DeviceMemory, ...]:
        """Those of `device_memory` that are of devices; all where only a tier computes."""
        of_devices = tuple(need for need in self.device_memory if need.device < self.n_devices)
        return of_devices or self.device_memory

    @property
    def has_gap(self) -> bool:
        """Whether the latency is what was asked for, so that its distance from a bound says much.

        A schedule gives up the latency of one microbatch for that of a step, and copies for what a
        stream of inputs takes; sums over replicas are in the latency, and in no bound.
        """
        return self.schedule is None and self.replicas is None and self.evaluation.rounds == 1

    @property
    def trains(self) -> bool:
        """Whether a training step is planned."""
        return bool(self.problem.graph.is_backward.any())

    @property
    def captured(self) -> CapturedGraph:
        """The graph that is placed, before operators are grouped."""
        return self.subject.captured
