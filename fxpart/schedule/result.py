"""`ScheduleResult`: the prediction for one step of a pipeline."""

from dataclasses import dataclass
from typing import NamedTuple

from fxpart.cost.prefetch import ShardedStep

__all__ = ["ReplicaSum", "ScheduleResult", "StageEvent", "StageTransfer", "StageUpdate"]


class StageEvent(NamedTuple):
    """A forward or backward of one stage for one microbatch."""

    device: int
    """Logical id."""
    stage: int
    kind: str
    """``F`` or ``B``."""
    microbatch: int
    start_s: float
    finish_s: float


class StageTransfer(NamedTuple):
    """A transfer between two stages for one microbatch."""

    source: int
    """Sending stage."""
    target: int
    """Receiving stage."""
    kind: str
    """``F`` or ``B``: the kind of action that sends it."""
    microbatch: int
    sent_bytes: int
    start_s: float
    finish_s: float


class ReplicaSum(NamedTuple):
    """The all-reduces of a device over replicas, at the end of a step."""

    device: int
    """Logical id."""
    start_s: float
    finish_s: float


class StageUpdate(NamedTuple):
    """The weight updates of one stage."""

    device: int
    """Logical id."""
    stage: int
    start_s: float
    finish_s: float


@dataclass(frozen=True, slots=True)
class ScheduleResult:
    """One step: forwards (and backwards) of all microbatches, then all-reduces and updates."""

    name: str
    """Name of the schedule."""
    microbatches: int
    training: bool
    step_s: float
    """From the first start to the last finish."""
    bubble_fraction: float
    """Share of the devices' time that is idle: ``1 - sum(busy_s) / (devices * step_s)``."""
    throughput_per_s: float
    """Microbatches per second over consecutive steps; infinite if nothing takes time."""
    devices: tuple[int, ...]
    """Logical ids of the devices in use, in the order of their first stages."""
    busy_s: tuple[float, ...]
    """Compute time of each of `devices` in a step."""
    peak_bytes: tuple[int, ...]
    """Peak memory of each of `devices` over the step."""
    events: tuple[StageEvent, ...]
    """Sorted by start, then device and finish."""
    transfers: tuple[StageTransfer, ...]
    """Sorted by start, then stages."""
    updates: tuple[StageUpdate, ...] = ()
    """Updates that take time, in the order of `devices`, then by stage."""
    sums: tuple[ReplicaSum, ...] = ()
    """All-reduces that take time, in the order of `devices`."""
    shards: ShardedStep | None = None
    """Collectives of weights sharded over replicas, if any."""
