"""A step of a pipeline, simulated: each device runs its actions in order, as soon as it can.

An action waits for the device, for the stage before (a backward: behind) it to have done the same
micro-batch, and for what it is sent. Transfers overlap computation; each ordered pair of devices
carries one at a time, first come first served. When a device has run its last action, it adds up
over replicas what it has a part of, in which it does not compute, and then updates the weights of
its stages; both wait for no other device.
"""

from collections import deque
from collections.abc import Sequence
from operator import attrgetter

from fxpart.schedule.costs import PipelineCosts, StageCost, StageLink
from fxpart.schedule.device_rows import device_rows
from fxpart.schedule.orders import Action
from fxpart.schedule.progress import Progress, refuse_stuck
from fxpart.schedule.result import (
    ReplicaSum,
    ScheduleResult,
    StageEvent,
    StageTransfer,
    StageUpdate,
)
from fxpart.schedule.row_memory import row_peak_bytes

__all__ = ["simulate_schedule"]


def simulate_schedule(name: str, costs: PipelineCosts, microbatches: int) -> ScheduleResult:
    """Return the predicted step of a pipeline.

    Memory is weights, inputs of all micro-batches, results and gradients so far, what waits for its
    backward, what the running action needs, and what updates make at the end. What has arrived but
    not been looked at yet, and what waits to be sent, is not counted. O(actions + transfers).

    Args:
        name: one of `SCHEDULES`.
        costs: stage s on the device of stage s modulo the number of devices; neighbours wait for
            each other also without a link.
        microbatches: how many of them a step has.

    Raises:
        SpecError: for a schedule, stages, links or micro-batches that do not go together.

    """
    devices, rows = device_rows(name, costs, microbatches)
    stages = costs.stages
    step = _Step(costs, len(devices), microbatches)
    step.run(rows)
    sums, summed_s = _sums(stages, devices, step.free_s)
    updates = _updates(stages, devices, summed_s)
    step_s = max(summed_s + [update.finish_s for update in updates])
    busy_s = tuple(_busy_s(stages, row) for row in rows)
    return ScheduleResult(
        name=name,
        microbatches=microbatches,
        training=costs.training,
        step_s=step_s,
        bubble_fraction=max(0.0, 1 - sum(busy_s) / (len(devices) * step_s)) if step_s > 0 else 0.0,
        throughput_per_s=microbatches / step_s if step_s > 0 else float("inf"),
        devices=devices,
        busy_s=busy_s,
        peak_bytes=tuple(row_peak_bytes(stages, row, microbatches) for row in rows),
        events=tuple(sorted(step.events, key=attrgetter("start_s", "device", "finish_s"))),
        transfers=tuple(sorted(step.transfers, key=attrgetter("start_s", "source", "target"))),
        updates=updates,
        sums=sums,
    )


class _Step:
    """A step while it is simulated."""

    def __init__(self, costs: PipelineCosts, devices: int, microbatches: int) -> None:
        self._stages, self._devices = costs.stages, devices
        self._progress = Progress(costs, devices, microbatches)
        self._ready_s = [[0.0] * microbatches for _ in range(2 * len(costs.stages))]
        self.free_s = [0.0] * devices
        """When each device has run its last action so far."""
        self.events: list[StageEvent] = []
        self.transfers: list[StageTransfer] = []

    def run(self, rows: Sequence[Sequence[Action]]) -> None:
        """Run every device's actions in order.

        When an action starts is decided by what is before it on its device and in the model alone,
        and a link carries what one device sends in the order in which that device makes it: so any
        order of looking at the devices gives the same times.
        """
        place, free_s = [0] * self._devices, self.free_s
        waiting = deque(range(self._devices))
        while waiting:
            device = waiting.popleft()
            row, woken = rows[device], dict[int, None]()
            while place[device] < len(row) and self._progress.can_start(row[place[device]]):
                action = row[place[device]]
                number = self._progress.number(action)
                start_s = max(free_s[device], self._ready_s[number][action.microbatch])
                free_s[device] = self._finish(action, number, start_s)
                place[device] += 1
                woken |= dict.fromkeys(
                    f % self._devices for f, _ in self._progress.followers(number)
                )
            waiting.extend(other for other in woken if other != device)
        refuse_stuck(rows, place)

    def _finish(self, action: Action, number: int, start_s: float) -> float:
        """Run an action, send what it makes, and return when it is done."""
        kind, microbatch, stage = action
        device = self._stages[stage].device
        finish_s = start_s + self._stages[stage].seconds(kind)
        self.events.append(StageEvent(device, stage, kind, microbatch, start_s, finish_s))
        for follower, link in self._progress.followers(number):
            there_s = self._send(link, microbatch, finish_s) if link else finish_s
            self._progress.arrived(follower, microbatch)
            self._ready_s[follower][microbatch] = max(self._ready_s[follower][microbatch], there_s)
        return finish_s

    def _send(self, link: StageLink, microbatch: int, made_s: float) -> float:
        """Send over a link, when it is free, and return when it has arrived."""
        begin_s, end_s = self._progress.sent(link, made_s)
        source, target, kind = link.source, link.target, link.kind
        self.transfers.append(
            StageTransfer(source, target, kind, microbatch, link.sent_bytes, begin_s, end_s)
        )
        return end_s


def _sums(
    stages: Sequence[StageCost], devices: Sequence[int], free_s: Sequence[float]
) -> tuple[tuple[ReplicaSum, ...], list[float]]:
    """Return the sums of each device, which begin when it is free, and when each has them."""
    found, done_s = [], list(free_s)
    for place, device in enumerate(devices):
        done_s[place] += sum(stage.reduce_s for stage in stages[place :: len(devices)])
        if done_s[place] > free_s[place]:
            found.append(ReplicaSum(device, free_s[place], done_s[place]))
    return tuple(found), done_s


def _updates(
    stages: Sequence[StageCost], devices: Sequence[int], free_s: Sequence[float]
) -> tuple[StageUpdate, ...]:
    """Return the updates of each device, which begin when it is free, stage after stage."""
    found = []
    for place, device in enumerate(devices):
        now_s = free_s[place]
        for stage in range(place, len(stages), len(devices)):
            taken_s = stages[stage].update_s
            if taken_s > 0:
                found.append(StageUpdate(device, stage, now_s, now_s + taken_s))
                now_s += taken_s
    return tuple(found)


def _busy_s(stages: Sequence[StageCost], row: Sequence[Action]) -> float:
    own = dict.fromkeys(action.stage for action in row)
    updates_s = sum(stages[stage].update_s for stage in own)
    return sum(stages[action.stage].computing_s(action.kind) for action in row) + updates_s
