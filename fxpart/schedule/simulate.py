"""A step of a pipeline, simulated: each device runs its actions in order, as soon as it can.

An action waits for the device, for the stage before (a backward: behind) it to have done the same
micro-batch, and for what it is sent. Transfers overlap computation; each ordered pair of devices
carries one at a time, first come first served.
"""

from collections import deque
from collections.abc import Sequence
from operator import attrgetter

from fxpart.errors import SpecError
from fxpart.schedule.costs import StageCost, StageLink
from fxpart.schedule.followers import followers
from fxpart.schedule.orders import Action, ordered_actions
from fxpart.schedule.result import ScheduleResult, StageEvent, StageTransfer

__all__ = ["simulate_schedule"]


def simulate_schedule(
    name: str,
    costs: Sequence[StageCost],
    links: Sequence[StageLink],
    microbatches: int,
    *,
    training: bool | None = None,
) -> ScheduleResult:
    """Return the predicted step of a pipeline of stages `costs` that send each other `links`.

    Memory is weights, inputs of all micro-batches, results and gradients so far, what waits for its
    backward, and what the running action needs. What has arrived
    but not been looked at yet, and what waits to be sent, is not counted. O(actions + transfers).

    Args:
        name: one of `SCHEDULES`.
        costs: the stages in order, stage s on the device of stage s modulo the number of devices.
        links: what passes between them; neighbours wait for each other also without one.
        microbatches: how many of them a step has.
        training: whether there is a backward; by default, whether one takes any time.

    Raises:
        SpecError: for a schedule, stages or micro-batches that do not go together.

    """
    devices = tuple(dict.fromkeys(cost.device for cost in costs))
    _check(costs, links, devices)
    if training is None:
        training = any(cost.backward_s > 0 for cost in costs)
    chunks = len(costs) // len(devices)
    rows = ordered_actions(name, len(devices), chunks, microbatches, training=training)
    step = _Step(costs, links, len(devices), microbatches)
    step.run(rows)
    step_s, busy_s = step.step_s, tuple(_busy_s(costs, row) for row in rows)
    return ScheduleResult(
        name=name,
        microbatches=microbatches,
        training=training,
        step_s=step_s,
        bubble_fraction=max(0.0, 1 - sum(busy_s) / (len(devices) * step_s)) if step_s > 0 else 0.0,
        throughput_per_s=microbatches / step_s if step_s > 0 else float("inf"),
        devices=devices,
        busy_s=busy_s,
        peak_bytes=tuple(_peak_bytes(costs, row, microbatches) for row in rows),
        events=tuple(sorted(step.events, key=attrgetter("start_s", "device", "finish_s"))),
        transfers=tuple(sorted(step.transfers, key=attrgetter("start_s", "source", "target"))),
    )


def _check(
    costs: Sequence[StageCost], links: Sequence[StageLink], devices: tuple[int, ...]
) -> None:
    homes = [cost.device for cost in costs]
    if not homes:
        raise SpecError("a schedule needs stages, got none; place the model with mode=pipeline")
    taken = [devices[stage % len(devices)] for stage in range(len(homes))]
    if homes != taken or len(homes) % len(devices):
        shown = ", ".join(map(str, homes[:12])) + (", ..." if homes[12:] else "")
        raise SpecError(
            f"a schedule needs stages that go over the {len(devices)} devices in turn, equally many"
            f" on each; they are on devices {shown}; place the model with mode=pipeline"
        )
    for link in links:
        there = min(link.source, link.target) >= 0 and max(link.source, link.target) < len(homes)
        forward = link.kind == "F" and link.source < link.target
        backward = link.kind == "B" and link.source > link.target
        if not there or not (forward or backward):
            raise SpecError(
                f"a link of kind {link.kind} from stage {link.source} to {link.target} of"
                f" {len(homes)} leads nowhere; F goes to a later stage, B to an earlier one"
            )


class _Step:
    """A step while it is simulated."""

    def __init__(
        self,
        costs: Sequence[StageCost],
        links: Sequence[StageLink],
        devices: int,
        microbatches: int,
    ) -> None:
        self._costs, self._devices = costs, devices
        self._followers = followers(costs, links)
        waited_for = [0] * (2 * len(costs))
        for follower, _ in (pair for pairs in self._followers for pair in pairs):
            waited_for[follower] += 1
        self._missing = [[count] * microbatches for count in waited_for]
        self._ready_s = [[0.0] * microbatches for _ in waited_for]
        self._link_free_s: dict[tuple[int, int], float] = {}
        self.events: list[StageEvent] = []
        self.transfers: list[StageTransfer] = []

    @property
    def step_s(self) -> float:
        """When all is done."""
        return max(event.finish_s for event in self.events)

    def run(self, rows: Sequence[Sequence[Action]]) -> None:
        """Run every device's actions in order.

        When an action starts is decided by what is before it on its device and in the model alone,
        and a link carries what one device sends in the order in which that device makes it: so any
        order of looking at the devices gives the same times.
        """
        place, free_s = [0] * self._devices, [0.0] * self._devices
        waiting = deque(range(self._devices))
        while waiting:
            device = waiting.popleft()
            row, woken = rows[device], dict[int, None]()
            while place[device] < len(row):
                action = row[place[device]]
                number = action.stage + (0 if action.kind == "F" else len(self._costs))
                if self._missing[number][action.microbatch]:
                    break
                start_s = max(free_s[device], self._ready_s[number][action.microbatch])
                free_s[device] = self._finish(action, number, start_s)
                place[device] += 1
                woken |= dict.fromkeys(f % self._devices for f, _ in self._followers[number])
            waiting.extend(other for other in woken if other != device)
        left = sum(map(len, rows)) - len(self.events)
        if left:
            raise RuntimeError(f"the order of a schedule is wrong: {left} actions never start")

    def _finish(self, action: Action, number: int, start_s: float) -> float:
        """Run an action, send what it makes, and return when it is done."""
        kind, microbatch, stage = action
        cost = self._costs[stage]
        finish_s = start_s + (cost.forward_s if kind == "F" else cost.backward_s)
        self.events.append(StageEvent(cost.device, stage, kind, microbatch, start_s, finish_s))
        for follower, link in self._followers[number]:
            there_s = self._send(link, microbatch, finish_s) if link else finish_s
            self._missing[follower][microbatch] -= 1
            self._ready_s[follower][microbatch] = max(self._ready_s[follower][microbatch], there_s)
        return finish_s

    def _send(self, link: StageLink, microbatch: int, made_s: float) -> float:
        """Send over a link, when it is free, and return when it has arrived."""
        source, target, kind = link.source, link.target, link.kind
        pair = (source % self._devices, target % self._devices)
        begin_s = max(made_s, self._link_free_s.get(pair, 0.0))
        end_s = self._link_free_s[pair] = begin_s + link.seconds
        self.transfers.append(
            StageTransfer(source, target, kind, microbatch, link.sent_bytes, begin_s, end_s)
        )
        return end_s


def _busy_s(costs: Sequence[StageCost], row: Sequence[Action]) -> float:
    return sum(
        costs[action.stage].forward_s if action.kind == "F" else costs[action.stage].backward_s
        for action in row
    )


def _peak_bytes(costs: Sequence[StageCost], row: Sequence[Action], microbatches: int) -> int:
    """Return the most that a device holds while it runs the actions of `row`."""
    mine = dict.fromkeys(action.stage for action in row)
    held = sum(costs[s].weight_bytes + microbatches * costs[s].input_bytes for s in mine)
    peak, has_gradient = held, set[int]()
    for kind, _, stage in row:
        cost = costs[stage]
        if kind == "F":
            peak = max(peak, held + cost.forward_peak_bytes)
            held += cost.saved_bytes + cost.output_bytes
            continue
        # What the micro-batch saved is part of the backward's peak.
        held -= cost.saved_bytes
        if stage in has_gradient:
            peak = max(peak, held + cost.backward_peak_bytes)
        else:
            peak = max(peak, held + cost.first_backward_peak_bytes)
            held += cost.gradient_bytes
            has_gradient.add(stage)
    return peak
