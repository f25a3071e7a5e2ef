"""How far a simulated step is: what each action still waits for, and when links are free."""

from collections.abc import Sequence

from fxpart.schedule.costs import PipelineCosts, StageLink
from fxpart.schedule.orders import Action

__all__ = ["Progress", "refuse_stuck"]

Followers = list[list[tuple[int, StageLink | None]]]


class Progress:
    """What of a step has arrived where, and been sent; of use to any way of counting time.

    The forward of stage s is number s, its backward number s + the number of stages.
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
        """Return the numbers of what waits for a forward or backward, and by which link if any."""
        return self._followers[number]

    def can_start(self, action: Action) -> bool:
        """Return whether all has arrived that an action waits for."""
        return not self._missing[self.number(action)][action.microbatch]

    def arrived(self, number: int, microbatch: int) -> None:
        """Note that one of the things has arrived that a forward or backward waits for."""
        self._missing[number][microbatch] -= 1

    def sent(self, link: StageLink, made_s: float) -> tuple[float, float]:
        """Return when what is made at `made_s` seconds begins to travel, and when it has arrived.

        An ordered pair of devices carries one transfer at a time, first come first served.
        """
        pair = (link.source % self._devices, link.target % self._devices)
        begin_s = max(made_s, self._link_free_s.get(pair, 0.0))
        end_s = self._link_free_s[pair] = begin_s + link.seconds
        return begin_s, end_s


def refuse_stuck(rows: Sequence[Sequence[Action]], place: Sequence[int]) -> None:
    """Refuse a step that has come to an end before all devices have run their rows.

    Raises:
        RuntimeError: when device d has run only the first `place[d]` of `rows[d]`: they wait for
            each other in a circle, which no order of `fxpart.schedule.SCHEDULES` lets happen.

    """
    left = sum(len(row) - done for row, done in zip(rows, place, strict=True))
    if left:
        raise RuntimeError(f"the order of a schedule is wrong: {left} actions never start")


def _followers(costs: PipelineCosts) -> Followers:
    count = len(costs.stages)
    found: Followers = [[] for _ in range(2 * count)]
    for stage in range(count):
        # The backward of a stage needs what its forward saved.
        found[stage].append((count + stage, None))
        if stage + 1 < count:
            found[stage].append((stage + 1, None))
            found[count + stage + 1].append((count + stage, None))
    for link in costs.links:
        first = 0 if link.kind == "F" else count
        found[first + link.source].append((first + link.target, link))
    return found
