"""Simulate a pipeline step: each device runs its actions in order, as early as possible.

An action waits for the device, for the previous stage (for a backward, the next one) to finish the
same microbatch, and for its transfers. Transfers overlap with computation; each ordered pair of
devices carries one at a time, first come first served. After its last action a device all-reduces
over replicas, without computing meanwhile, and then updates the weights of its stages; neither
waits for another device.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from operator import attrgetter

from fxpart.cost.prefetch import ShardedStep
from fxpart.errors import SpecError
from fxpart.schedule.costs import PipelineCosts, StageCost, StageLink
from fxpart.schedule.orders import Action, ordered_actions
from fxpart.schedule.result import (
    ReplicaSum,
    ScheduleResult,
    StageEvent,
    StageTransfer,
    StageUpdate,
)
from fxpart.schedule.stage_shards import Gathered, gathered_after, stage_needs

__all__ = [
    "Progress",
    "device_rows",
    "refuse_stuck",
    "simulate_schedule",
]

# Progress of a simulated step: pending dependencies of actions, and when links become free.

Followers = list[list[tuple[int, StageLink | None]]]


class Progress:
    """Dependencies and transfers of a step, independent of how time advances.

    The forward of stage s has number s, its backward number s + the number of stages.
    """

    def __init__(self, costs: PipelineCosts, devices: int, microbatches: int) -> None:
        self._costs, self._devices = costs, devices
        self._followers = _followers(costs)
        waited_for = [0] * len(self._followers)
        for number, _ in (pair for pairs in self._followers for pair in pairs):
            waited_for[number] += 1
        self._missing = [[count] * microbatches for count in waited_for]
        self._link_free_s: dict[tuple[int, int], float] = {}

    def number(self, action: Action) -> int:
        """Return the number of an action's forward or backward."""
        return action.stage + (0 if action.kind == "F" else len(self._costs.stages))

    def followers(self, number: int) -> list[tuple[int, StageLink | None]]:
        """Return the numbers of the dependents of a forward or backward, with their link if any."""
        return self._followers[number]

    def can_start(self, action: Action) -> bool:
        """Return whether all dependencies of an action have arrived."""
        return not self._missing[self.number(action)][action.microbatch]

    def arrived(self, number: int, microbatch: int) -> None:
        """Record the arrival of one dependency of a forward or backward."""
        self._missing[number][microbatch] -= 1

    def sent(self, link: StageLink, made_s: float) -> tuple[float, float]:
        """Schedule the transfer of a result available at `made_s`; return its start and end.

        An ordered pair of devices carries one transfer at a time, first come first served.
        """
        pair = (link.source % self._devices, link.target % self._devices)
        begin_s = max(made_s, self._link_free_s.get(pair, 0.0))
        end_s = self._link_free_s[pair] = begin_s + link.seconds
        return begin_s, end_s


def refuse_stuck(rows: Sequence[Sequence[Action]], positions: Sequence[int]) -> None:
    """Refuse a step that is deadlocked, with only the first `positions[d]` of `rows[d]` run.

    Raises:
        RuntimeError: if actions remain, which no order in `fxpart.schedule.SCHEDULES` causes.

    """
    remaining = sum(len(row) - position for row, position in zip(rows, positions, strict=True))
    if remaining:
        raise RuntimeError(f"the order of a schedule is wrong: {remaining} actions never start")


def _followers(costs: PipelineCosts) -> Followers:
    count = len(costs.stages)
    followers: Followers = [[] for _ in range(2 * count)]
    for stage in range(count):
        # The backward of a stage needs the activations saved by its forward.
        followers[stage].append((count + stage, None))
        if stage + 1 < count:
            followers[stage].append((stage + 1, None))
            followers[count + stage + 1].append((count + stage, None))
    for link in costs.links:
        first = 0 if link.kind == "F" else count
        followers[first + link.source].append((first + link.target, link))
    return followers


# Devices of a pipeline, and the actions that each runs in a step.


def device_rows(
    name: str, costs: PipelineCosts, microbatches: int
) -> tuple[tuple[int, ...], tuple[tuple[Action, ...], ...]]:
    """Return the devices in the order of their first stages, and the actions of each in order.

    Raises:
        SpecError: if the schedule, stages, links or microbatches are invalid.

    """
    homes = [stage.device for stage in costs.stages]
    devices = tuple(dict.fromkeys(homes))
    _refuse_other_than_turns(homes, devices)
    for link in costs.links:
        _refuse_astray(link, len(homes))
    chunks = len(homes) // len(devices)
    rows = ordered_actions(name, len(devices), chunks, microbatches, training=costs.training)
    return devices, rows


def _refuse_other_than_turns(homes: Sequence[int], devices: Sequence[int]) -> None:
    if not homes:
        raise SpecError("a schedule needs stages, got none; place the model with mode=pipeline")
    expected = [devices[stage % len(devices)] for stage in range(len(homes))]
    if homes != expected or len(homes) % len(devices):
        shown = ", ".join(map(str, homes[:12])) + (", ..." if homes[12:] else "")
        raise SpecError(
            f"a schedule needs stages that take the {len(devices)} devices in turn, with the same "
            f"number on each; they are on devices {shown}; place the model with mode=pipeline"
        )


def _refuse_astray(link: StageLink, stages: int) -> None:
    inside = min(link.source, link.target) >= 0 and max(link.source, link.target) < stages
    forward = link.kind == "F" and link.source < link.target
    backward = link.kind == "B" and link.source > link.target
    if not inside or not (forward or backward):
        raise SpecError(
            f"a link of kind {link.kind} from stage {link.source} to {link.target} of"
            f" {stages} leads nowhere; F goes to a later stage, B to an earlier one"
        )


# Peak memory of a device over a step.


def _row_peak_bytes(costs: Sequence[StageCost], row: Sequence[Action], microbatches: int) -> int:
    """Return the peak memory of a device while it runs the actions of `row`, then its updates.

    `costs` has all stages of the pipeline.
    """
    stages = dict.fromkeys(action.stage for action in row)
    resident_bytes = sum(
        costs[s].weight_bytes + microbatches * costs[s].input_bytes for s in stages
    )
    peak, has_gradient = resident_bytes, set[int]()
    gathered = dict.fromkeys(stages, Gathered.NOTHING)
    for kind, _, stage in row:
        cost = costs[stage]
        needs = stage_needs(cost, gathered[stage])
        gathered[stage] = gathered_after(cost, kind)
        # The peaks of actions include saved activations and gathered weights.
        resident_bytes -= needs.gathered_bytes + (cost.saved_bytes if kind == "B" else 0)
        if kind == "F":
            peak = max(peak, resident_bytes + needs.forward_peak_bytes)
            resident_bytes += cost.saved_bytes + cost.output_bytes
        elif stage in has_gradient:
            peak = max(peak, resident_bytes + needs.backward_peak_bytes)
        else:
            peak = max(peak, resident_bytes + needs.first_backward_peak_bytes)
            resident_bytes += cost.gradient_bytes
            has_gradient.add(stage)
        resident_bytes += stage_needs(cost, gathered[stage]).gathered_bytes
    for shards in filter(None, (costs[stage].shards for stage in stages)):
        resident_bytes -= shards.whole_bytes + shards.gradient_bytes
        peak = max(peak, resident_bytes + shards.reduce_peak_bytes)
        resident_bytes += shards.shard_bytes
    for stage in stages:
        peak = max(peak, resident_bytes + costs[stage].update_peak_bytes)
        resident_bytes += costs[stage].update_kept_bytes
    return peak


def simulate_schedule(name: str, costs: PipelineCosts, microbatches: int) -> ScheduleResult:
    """Simulate a step of a pipeline.

    Memory counts weights, inputs of all microbatches, results and gradients so far, activations in
    flight, the tensors of the running action, and temporaries of updates at the end. Received
    tensors that are not in use yet, and tensors waiting to be sent, are not counted. O(actions +
    transfers).

    Args:
        name: one of `SCHEDULES`.
        costs: the stages, with stage s on the device of stage s modulo the number of devices;
            neighbouring stages wait for each other even without a link.
        microbatches: number of microbatches per step.

    Raises:
        SpecError: if the schedule, stages, links or microbatches are invalid.

    """
    devices, rows = device_rows(name, costs, microbatches)
    stages = costs.stages
    step, sums, updates, step_s = _run(costs, devices, rows, microbatches)
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
        peak_bytes=tuple(_row_peak_bytes(stages, row, microbatches) for row in rows),
        events=tuple(sorted(step.events, key=attrgetter("start_s", "device", "finish_s"))),
        transfers=tuple(sorted(step.transfers, key=attrgetter("start_s", "source", "target"))),
        updates=updates,
        sums=sums,
        shards=_sharded(costs, devices, rows, microbatches, step_s),
    )


def _run(
    costs: PipelineCosts,
    devices: Sequence[int],
    rows: Sequence[Sequence[Action]],
    microbatches: int,
) -> tuple["_Step", tuple[ReplicaSum, ...], tuple[StageUpdate, ...], float]:
    """Return the simulated step, its all-reduces and updates, and the end of all."""
    step = _Step(costs, len(devices), microbatches)
    step.run(rows)
    sums, summed_s = _sums(costs.stages, devices, step.free_s)
    updates = _updates(costs.stages, devices, summed_s)
    return step, sums, updates, max(summed_s + [update.finish_s for update in updates])


def _sharded(
    costs: PipelineCosts,
    devices: Sequence[int],
    rows: Sequence[Sequence[Action]],
    microbatches: int,
    step_s: float,
) -> ShardedStep | None:
    """Return the cost of collectives of weights and gradients on the device with the most."""
    if not any(stage.shards for stage in costs.stages):
        return None
    free_collectives = replace(costs, stages=tuple(s.without_collectives() for s in costs.stages))
    alone_s = _run(free_collectives, devices, rows, microbatches)[-1]
    by_device = []
    for row in rows:
        collectives = [
            collective
            for stage in dict.fromkeys(action.stage for action in row)
            if (shards := costs.stages[stage].shards) is not None
            for collective in shards.collectives(a.kind for a in row if a.stage == stage)
        ]
        size = sum(collective.size_bytes for collective in collectives)
        by_device.append((sum(c.seconds for c in collectives), len(collectives), size))
    collective_s, count, size = max(by_device)
    return ShardedStep(step_s, count, size, collective_s, max(0.0, step_s - alone_s))


class _Step:
    """State of the simulation of a step."""

    def __init__(self, costs: PipelineCosts, devices: int, microbatches: int) -> None:
        self._stages, self._devices = costs.stages, devices
        self._progress = Progress(costs, devices, microbatches)
        self._ready_s = [[0.0] * microbatches for _ in range(2 * len(costs.stages))]
        self._gathered = [Gathered.NOTHING] * len(costs.stages)
        self.free_s = [0.0] * devices
        """End of the last action so far on each device."""
        self.events: list[StageEvent] = []
        self.transfers: list[StageTransfer] = []

    def run(self, rows: Sequence[Sequence[Action]]) -> None:
        """Run every device's actions in order.

        The start of an action depends only on earlier actions of its device and its dependencies,
        and a link carries a device's results in the order in which they are produced. So the times
        do not depend on the order in which devices are visited.
        """
        positions, free_s = [0] * self._devices, self.free_s
        queue = deque(range(self._devices))
        while queue:
            device = queue.popleft()
            row, woken = rows[device], dict[int, None]()
            while positions[device] < len(row) and self._progress.can_start(row[positions[device]]):
                action = row[positions[device]]
                number = self._progress.number(action)
                start_s = max(free_s[device], self._ready_s[number][action.microbatch])
                free_s[device] = self._finish(action, number, start_s)
                positions[device] += 1
                woken |= dict.fromkeys(
                    f % self._devices for f, _ in self._progress.followers(number)
                )
            queue.extend(follower for follower in woken if follower != device)
        refuse_stuck(rows, positions)

    def _finish(self, action: Action, number: int, start_s: float) -> float:
        """Run an action, send its results, and return its end."""
        kind, microbatch, stage = action
        device = self._stages[stage].device
        finish_s = start_s + self._stages[stage].seconds(kind, self._gathered[stage])
        self._gathered[stage] = gathered_after(self._stages[stage], kind)
        self.events.append(StageEvent(device, stage, kind, microbatch, start_s, finish_s))
        for follower, link in self._progress.followers(number):
            there_s = self._send(link, microbatch, finish_s) if link else finish_s
            self._progress.arrived(follower, microbatch)
            self._ready_s[follower][microbatch] = max(self._ready_s[follower][microbatch], there_s)
        return finish_s

    def _send(self, link: StageLink, microbatch: int, made_s: float) -> float:
        """Send over a link when it is free; return the arrival."""
        begin_s, end_s = self._progress.sent(link, made_s)
        source, target, kind = link.source, link.target, link.kind
        self.transfers.append(
            StageTransfer(source, target, kind, microbatch, link.sent_bytes, begin_s, end_s)
        )
        return end_s


def _sums(
    stages: Sequence[StageCost], devices: Sequence[int], free_s: Sequence[float]
) -> tuple[tuple[ReplicaSum, ...], list[float]]:
    """Return the all-reduces of each device, which begin when it is free, and their ends."""
    sums, done_s = [], list(free_s)
    for position, device in enumerate(devices):
        done_s[position] += sum(stage.reduce_s for stage in stages[position :: len(devices)])
        if done_s[position] > free_s[position]:
            sums.append(ReplicaSum(device, free_s[position], done_s[position]))
    return tuple(sums), done_s


def _updates(
    stages: Sequence[StageCost], devices: Sequence[int], free_s: Sequence[float]
) -> tuple[StageUpdate, ...]:
    """Return the updates of each device, which begin when it is free, one stage at a time."""
    updates = []
    for position, device in enumerate(devices):
        now_s = free_s[position]
        for stage in range(position, len(stages), len(devices)):
            update_s = stages[stage].update_s
            if update_s > 0:
                updates.append(StageUpdate(device, stage, now_s, now_s + update_s))
                now_s += update_s
    return tuple(updates)


def _busy_s(stages: Sequence[StageCost], row: Sequence[Action]) -> float:
    stages_of_row = dict.fromkeys(action.stage for action in row)
    updates_s = sum(stages[stage].update_s for stage in stages_of_row)
    return sum(stages[action.stage].computing_s(action.kind) for action in row) + updates_s
