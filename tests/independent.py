"""The cost of a placement, computed independently of the package and more slowly.

The schedule is simulated by events in order of time, with a queue for each device and link; the
memory by finding, at each moment, the storages still needed on the device.
"""

import heapq
from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np

from fxpart.core.graph import IntArray, OpGraph
from fxpart.cost.problem import Problem


@dataclass
class _Simulation:
    """The state of devices and links at one moment, and the pending events."""

    problem: Problem
    device_of: IntArray
    waiting: dict[int, list[int]]
    """Remaining operators of each device."""
    readers: dict[int, list[int]]
    """Operators that read each value."""
    there: set[tuple[int, int]] = field(default_factory=set)
    """Pairs of a value and a device that has it."""
    busy: set[int] = field(default_factory=set)
    link_free: dict[tuple[int, int], float] = field(default_factory=lambda: defaultdict(float))
    events: list[tuple[float, int, str, tuple[int, ...]]] = field(default_factory=list)
    count: int = 0

    def later(self, moment: float, kind: str, *what: int) -> None:
        """Schedule an event at `moment`; events at the same moment keep their order."""
        self.count += 1
        heapq.heappush(self.events, (moment, self.count, kind, what))

    def start_what_can(self, now: float) -> None:
        """Start the next operator of every idle device whose inputs are present."""
        graph = self.problem.graph
        for device, queue in self.waiting.items():
            if device in self.busy or not queue:
                continue
            reads = [int(v) for v in graph.reads_of(queue[0]) if graph.value_producer[v] >= 0]
            if all((value, device) in self.there for value in reads):
                op = queue.pop(0)
                self.busy.add(device)
                self.later(now + self.problem.costs.op_time_s[op, device], "done", op)

    def finish(self, op: int, now: float) -> None:
        """Free the device of `op`, and send its results."""
        home = int(self.device_of[op])
        self.busy.remove(home)
        for number in np.flatnonzero(self.problem.graph.value_producer == op):
            value = int(number)
            self.there.add((value, home))
            for target in dict.fromkeys(int(self.device_of[r]) for r in self.readers[value]):
                if target != home:
                    self.send(value, home, target, now)

    def send(self, value: int, home: int, target: int, now: float) -> None:
        """Queue `value` on the link, after everything queued before."""
        topology = self.problem.topology
        begin = max(now, self.link_free[home, target])
        end = begin + topology.latency_s[home, target]
        end += self.problem.graph.value_bytes[value] / topology.bytes_per_s[home, target]
        self.link_free[home, target] = end
        self.later(end, "arrived", value, target)


def latency_s(problem: Problem, device_of: IntArray) -> float:
    """Return the simulated latency in seconds."""
    waiting: dict[int, list[int]] = defaultdict(list)
    readers: dict[int, list[int]] = defaultdict(list)
    for op in range(problem.graph.n_ops):
        waiting[int(device_of[op])].append(op)
        for value in problem.graph.reads_of(op):
            readers[int(value)].append(op)
    this = _Simulation(problem, device_of, waiting, readers)
    now = 0.0
    this.start_what_can(now)
    while this.events:
        now, _, kind, what = heapq.heappop(this.events)
        if kind == "arrived":
            this.there.add((what[0], what[1]))
        else:
            this.finish(what[0], now)
        this.start_what_can(now)
    assert not any(waiting.values()), "the schedule stopped before all operators ran"
    return float(now)


def _storage(graph: OpGraph, device_of: IntArray, device: int, value: int) -> tuple[int, int, int]:
    """Return (first value, birth, bytes) of the storage of `value` on `device`."""
    while True:
        maker = int(graph.value_producer[value])
        if maker < 0:
            return value, -1, 0
        if device_of[maker] != device:
            return value, maker, int(graph.value_bytes[value])
        if graph.value_base[value] < 0:
            return value, maker, int(graph.value_alloc_bytes[value])
        value = int(graph.value_base[value])


def peak_bytes(graph: OpGraph, device_of: IntArray, device: int) -> int:
    """Return the peak bytes on `device` over the operators of the graph."""
    ops = [op for op in range(graph.n_ops) if device_of[op] == device]
    if not ops:
        return 0
    weights = {int(w) for op in ops for w in graph.uses_of(op)}
    resident = sum(int(graph.weight_bytes[w]) for w in weights)
    seen = {int(v) for op in ops for v in graph.reads_of(op)}
    resident += sum(int(graph.value_alloc_bytes[v]) for v in seen if graph.value_producer[v] < 0)
    needed_until: dict[tuple[int, int, int], int] = {}
    for op in ops:
        values = [int(v) for v in np.flatnonzero(graph.value_producer == op)]
        for value in [*(int(v) for v in graph.reads_of(op)), *values]:
            storage = _storage(graph, device_of, device, value)
            until = graph.n_ops if value in values and graph.value_is_output[value] else op
            needed_until[storage] = max(needed_until.get(storage, -1), until)
    return resident + max(
        sum(s[2] for s, until in needed_until.items() if s[1] <= moment <= until)
        for moment in range(graph.n_ops)
    )
