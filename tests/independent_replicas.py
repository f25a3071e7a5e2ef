"""The memory of a device in a placement with replicas, counted round by round."""

import numpy as np

from fxpart.core.assignment import Assignment
from fxpart.cost.problem import Problem
from tests import independent


def homes(placed: Assignment, op: int) -> tuple[int, ...]:
    """Return the devices that alternate in running an operator."""
    return placed.devices_of_partition[int(placed.partition_of[op])]


def peak_bytes(this: Problem, placed: Assignment, device: int) -> int:
    """Return a device's bytes: the independent peak of each round, with its weights exchanged."""
    graph = this.graph
    ops = [op for op in range(graph.n_ops) if device in homes(placed, op)]
    kept = {int(w) for op in ops for w in graph.uses_of(op)}
    most = 0
    for index in range(placed.rounds):
        turns = [homes(placed, op) for op in range(graph.n_ops)]
        where = np.array([turn[index % len(turn)] for turn in turns])
        used = {int(w) for op in np.flatnonzero(where == device) for w in graph.uses_of(int(op))}
        peak = independent.peak_bytes(graph, where, device)
        most = max(most, peak - sum(int(graph.weight_bytes[w]) for w in used))
    return most + sum(int(graph.weight_bytes[w]) for w in kept)
