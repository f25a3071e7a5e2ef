"""Simulate a pipeline step whose stages share the CPU cores of one machine.

With more stages than cores, as on a laptop, the system gives each running stage an equal share.
`fxpart.schedule.simulate_schedule` is for stages that each have a device.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

from fxpart.errors import SpecError
from fxpart.schedule.costs import PipelineCosts, StageCost
from fxpart.schedule.orders import Action
from fxpart.schedule.simulate import Progress, device_rows, refuse_stuck

__all__ = ["step_on_cores"]


def step_on_cores(name: str, costs: PipelineCosts, microbatches: int, cores: int) -> float:
    """Return the time of a step in seconds if all devices share `cores` cores.

    While k stages compute, each runs at ``min(1, cores / k)`` of its speed: `costs` assume a whole
    core. Transfers need no core. With a core per device, the result is that of `simulate_schedule`
    without weight updates, which torch's engine does not run. O(actions x devices).

    Raises:
        SpecError: if there is less than one core, or `simulate_schedule` would refuse.

    """
    if cores < 1:
        raise SpecError(f"a pipeline needs a core to run on, got cores={cores}")
    devices, rows = device_rows(name, costs, microbatches)
    return _Sharing(costs.stages, rows, Progress(costs, len(devices), microbatches)).run(cores)


@dataclass(eq=False)
class _Sharing:
    """State of the simulation of a step."""

    stages: Sequence[StageCost]
    rows: Sequence[Sequence[Action]]
    progress: Progress
    now_s: float = 0.0
    left_s: dict[int, float] = field(default_factory=dict)
    """Remaining work of the action running on each busy device, in s."""
    arrivals: list[tuple[float, int, int]] = field(default_factory=list)
    """Heap of (time of arrival, number of the forward or backward, microbatch)."""

    def __post_init__(self) -> None:
        self.place = [0] * len(self.rows)

    def run(self, cores: int) -> float:
        """Run the simulation and return the end of the last action.

        Raises:
            RuntimeError: as `refuse_stuck`.

        """
        self._start()
        while self.left_s or self.arrivals:
            speed = min(1.0, cores / max(1, len(self.left_s)))
            least_s = min(self.left_s.values(), default=math.inf)
            arrives_s = self.arrivals[0][0] if self.arrivals else math.inf
            if arrives_s <= self.now_s + least_s / speed:
                self._work((arrives_s - self.now_s) * speed)
                self.now_s = arrives_s
                self._receive()
            else:
                ended = [device for device, left_s in self.left_s.items() if left_s == least_s]
                self._work(least_s)
                self.now_s += least_s / speed
                for device in ended:
                    del self.left_s[device]
                    self._finish(device)
            self._start()
        refuse_stuck(self.rows, self.place)
        return self.now_s

    def _work(self, worked_s: float) -> None:
        self.left_s = {
            d: max(0.0, remaining_s - worked_s) for d, remaining_s in self.left_s.items()
        }

    def _receive(self) -> None:
        while self.arrivals and self.arrivals[0][0] <= self.now_s:
            _, number, microbatch = heappop(self.arrivals)
            self.progress.arrived(number, microbatch)

    def _start(self) -> None:
        """Start the next action of every idle device if it is ready."""
        for device, row in enumerate(self.rows):
            if device in self.left_s or self.place[device] == len(row):
                continue
            action = row[self.place[device]]
            if self.progress.can_start(action):
                self.left_s[device] = self.stages[action.stage].seconds(action.kind)

    def _finish(self, device: int) -> None:
        """Complete the action of a device and send its results."""
        action = self.rows[device][self.place[device]]
        self.place[device] += 1
        for follower, link in self.progress.followers(self.progress.number(action)):
            there_s = self.progress.sent(link, self.now_s)[1] if link else self.now_s
            heappush(self.arrivals, (there_s, follower, action.microbatch))
