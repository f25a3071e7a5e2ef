"""`ScheduleResult`: what one step of a pipeline is predicted to be."""

from dataclasses import dataclass
from typing import NamedTuple

from fxpart.cost.prefetch import ShardedStep

__all__ = ["ReplicaSum", "ScheduleResult", "StageEvent", "StageTransfer", "StageUpdate"]


class StageEvent(NamedTuple):
    """A forward or backward of one stage for one micro-batch."""

    device: int
    """Logical id."""
    stage: int
    kind: str
    """``F`` or ``B``."""
    microbatch: int
    start_s: float
    finish_s: float


class StageTransfer(NamedTuple):
    """What one stage sends another for one micro-batch."""

    source: int
    """Stage that sends."""
    target: int
    """Stage that receives."""
    kind: str
    """``F`` or ``B``: what it is sent after."""
    microbatch: int
    sent_bytes: int
    start_s: float
    finish_s: float


class ReplicaSum(NamedTuple):
    """The sums over replicas of what a device has a part of, at the end of a step."""

    device: int
    """Logical id."""
    start_s: float
    finish_s: float


class StageUpdate(NamedTuple):
    """The updates of the weights of one stage."""

    device: int
    """Logical id."""
    stage: int
    start_s: float
    finish_s: float


@dataclass(frozen=True, slots=True)
class ScheduleResult:
    """One step: all micro-batches through all stages, and back in training, then sums, updates."""

    name: str
    """Of the schedule."""
    microbatches: int
    training: bool
    step_s: float
    """From the first start to the last finish."""
    bubble_fraction: float
    """Share of the devices' time in which they wait: ``1 - sum(busy_s) / (devices * step_s)``."""
    throughput_per_s: float
    """Micro-batches per second, one step after the other; infinite where nothing takes time."""
    devices: tuple[int, ...]
    """Logical ids of the devices in use, in the order of their first stages."""
    busy_s: tuple[float, ...]
    """Time that each of `devices` computes in a step."""
    peak_bytes: tuple[int, ...]
    """The most that each of `devices` holds at any time of the step."""
    events: tuple[StageEvent, ...]
    """By start, of equal ones by device and finish."""
    transfers: tuple[StageTransfer, ...]
    """By start, of equal ones by stages."""
    updates: tuple[StageUpdate, ...] = ()
    """Of stages whose updates take time, by device in the order of `devices`, then by stage."""
    sums: tuple[ReplicaSum, ...] = ()
    """Of devices whose sums over replicas take time, in the order of `devices`."""
    shards: ShardedStep | None = None
    """The collectives of weights that replicas share."""
