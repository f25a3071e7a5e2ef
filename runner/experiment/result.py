"""The result of an experiment: a placement, its cost, and the results of optional features."""

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
from runner.experiment.measurement import Measured
from runner.experiment.replicas import Replicas
from runner.experiment.serving_table import ServingRow
from runner.experiment.subject import Subject
from runner.experiment.tensor_split import TensorSplit
from runner.experiment.whole_modules import WholeModules

LARGEST = 100
"""Number of tensors listed at each device's peak."""


# Without slots, for the cached property.
@dataclass(frozen=True, eq=False)
class Result:
    """The result of an experiment."""

    subject: Subject
    problem: Problem
    assignment: Assignment
    evaluation: Evaluation
    partition_s: float
    """Time spent by the mode."""
    batch_size: int = 1
    """Examples in one input, over all replicas."""
    tokens: int | None = None
    """Tokens per example of a text model."""
    price_per_hour: float | None = None
    """Price of all devices in USD, if known."""
    step: str | None = None
    """The serving step, one of `fxpart.core.phases.CACHED_STEPS`."""
    measured_on: str | None = None
    """The device whose operators were measured, if times are measurements."""
    schedule: ScheduleResult | None = None
    """The simulated pipeline schedule."""
    replicas: Replicas | None = None
    """Data parallelism and its cost; `evaluation` is of one replica, all-reduces included."""
    device_memory: tuple[DeviceMemory, ...] = ()
    """The memory needed on each device, including that besides tensors."""
    batches: BatchReport | None = None
    """The cost at other batch sizes."""
    measured: Measured | None = None
    """Measurements, if the plan was executed."""
    whole: WholeModules | None = None
    """The best plan that keeps modules whole, next to that of a search."""
    subject_line: str = ""
    """The summary by `runner.experiment.subject_line`."""
    shards: ShardedStep | None = None
    """The cost of ZeRO, whose collectives are in the times of `evaluation`."""
    split: TensorSplit | None = None
    """The cost of tensor parallelism; each device of `evaluation` then stands for a group."""
    curve: tuple[Progress, ...] = ()
    """The progress of `mode=optimal`."""
    offloaded: Offloaded | None = None
    """The tensors in tiers, if the devices cannot hold all."""
    generation: Generation | None = None
    """Times and limits of ``phase=generate``; `evaluation` is of the last decode."""
    other_sizes: tuple[ServingRow, ...] = ()
    """The generation at each size in ``serving_sweep``."""
    times_note: str = ""
    """A note on the source of times, such as for a plan run here with times from elsewhere."""

    @cached_property
    def peaks(self) -> tuple[DevicePeak, ...]:
        """The memory peak of each device, with its `LARGEST` tensors."""
        return device_peaks(self.problem, self.assignment, LARGEST)

    @property
    def n_devices(self) -> int:
        """Number of devices in `evaluation`; a computing tier comes after them."""
        return len(self.offloaded.devices) if self.offloaded else len(self.evaluation.devices)

    @property
    def device_uses(self) -> tuple[DeviceUse, ...]:
        """The use of each device, without tiers."""
        return self.evaluation.devices[: self.n_devices]

    @property
    def peak_bytes(self) -> int:
        """The largest peak of all devices."""
        return max(use.peak_bytes for use in self.device_uses)

    @property
    def device_peaks(self) -> tuple[DevicePeak, ...]:
        """The `peaks` of devices; all peaks if only a tier computes."""
        of_devices = tuple(peak for peak in self.peaks if peak.device < self.n_devices)
        return of_devices or self.peaks

    @property
    def copy_rooms(self) -> dict[int, int]:
        """Bytes on each device kept free for copies from tiers, by logical id."""
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
        """The `device_memory` of devices; all of it if only a tier computes."""
        of_devices = tuple(need for need in self.device_memory if need.device < self.n_devices)
        return of_devices or self.device_memory

    @property
    def has_gap(self) -> bool:
        """Whether latency is what the plan optimizes, so that its optimality gap is meaningful.

        A schedule trades the latency of one microbatch for that of a step, and copies of the model
        trade it for throughput; all-reduces count in the latency, but not in the bound.
        """
        return self.schedule is None and self.replicas is None and self.evaluation.rounds == 1

    @property
    def trains(self) -> bool:
        """Whether a training step is planned."""
        return bool(self.problem.graph.is_backward.any())

    @property
    def captured(self) -> CapturedGraph:
        """The placed graph, before grouping of operators."""
        return self.subject.captured
