"""The cost of a placement, computed again, slowly and in another way than the package does.

The schedule by events in order of time, with a queue for each device and link; the memory by
asking at each moment which storages somebody on the device still needs.
"""

import heapq
from collections import defaultdict

import numpy as np

from fxpart.graph import IntArray, OpGraph
from fxpart.problem import Problem


def latency_s(problem: Problem, device_of: IntArray) -> float:
    """Return the simulated latency in seconds."""
    graph, time = problem.graph, problem.costs.op_time_s
    queue: dict[int, list[int]] = defaultdict(list)
    for op in range(graph.n_ops):
        queue[int(device_of[op])].append(op)
    readers: dict[int, list[int]] = defaultdict(list)
    missing: dict[int, set[tuple[int, int]]] = defaultdict(set)
    for op in range(graph.n_ops):
        for value in graph.reads_of(op):
            if graph.value_producer[value] >= 0:
                readers[int(value)].append(op)
                missing[op].add((int(value), int(device_of[op])))
    there: set[tuple[int, int]] = set()
    busy: dict[int, bool] = defaultdict(bool)
    link_free: dict[tuple[int, int], float] = defaultdict(float)
    events: list[tuple[float, int, str, tuple[int, ...]]] = []
    now, count = 0.0, 0

    def start_what_can() -> None:
        nonlocal count
        for device, waiting in queue.items():
            if not busy[device] and waiting and missing[waiting[0]] <= there:
                op = waiting.pop(0)
                busy[device] = True
                count += 1
                heapq.heappush(events, (now + time[op, device], count, "done", (op,)))

    start_what_can()
    while events:
        now, _, kind, what = heapq.heappop(events)
        if kind == "arrived":
            there.add((what[0], what[1]))
        else:
            op, home = what[0], int(device_of[what[0]])
            busy[home] = False
            for value in np.flatnonzero(graph.value_producer == op):
                there.add((int(value), home))
                for target in dict.fromkeys(int(device_of[r]) for r in readers[int(value)]):
                    if target == home:
                        continue
                    begin = max(now, link_free[home, target])
                    rate = problem.topology.bytes_per_s[home, target]
                    end = begin + problem.topology.latency_s[home, target]
                    end += graph.value_bytes[value] / rate
                    link_free[home, target] = end
                    count += 1
                    heapq.heappush(events, (end, count, "arrived", (int(value), target)))
        start_what_can()
    assert not any(queue.values()), "the schedule stopped before all operators ran"
    return float(now)


def _storage(graph: OpGraph, device_of: IntArray, device: int, value: int) -> tuple[int, int, int]:
    """Return (first value, born at, bytes) of the storage that `value` is in on `device`."""
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
    """Return the most bytes on `device` at any operator of the graph."""
    mine = [op for op in range(graph.n_ops) if device_of[op] == device]
    if not mine:
        return 0
    weights = {int(w) for op in mine for w in graph.uses_of(op)}
    resident = sum(int(graph.weight_bytes[w]) for w in weights)
    seen = {int(v) for op in mine for v in graph.reads_of(op)}
    resident += sum(int(graph.value_alloc_bytes[v]) for v in seen if graph.value_producer[v] < 0)
    needed_until: dict[tuple[int, int, int], int] = {}
    for op in mine:
        made = [int(v) for v in np.flatnonzero(graph.value_producer == op)]
        for value in [*(int(v) for v in graph.reads_of(op)), *made]:
            storage = _storage(graph, device_of, device, value)
            until = graph.n_ops if value in made and graph.value_is_output[value] else op
            needed_until[storage] = max(needed_until.get(storage, -1), until)
    return resident + max(
        sum(s[2] for s, until in needed_until.items() if s[1] <= moment <= until)
        for moment in range(graph.n_ops)
    )
