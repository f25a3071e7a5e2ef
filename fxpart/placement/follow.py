"""`follow`: place another step of the same model according to the placement of its weights."""

from collections import Counter

import numpy as np

from fxpart.core.assignment import Assignment
from fxpart.core.graph import IntArray, OpGraph
from fxpart.core.partitions import partition_by_device

__all__ = ["follow"]


def follow(graph: OpGraph, assignment: Assignment, other: OpGraph) -> Assignment:
    """Return a placement of `other` that keeps weights and caches where `assignment` has them.

    `assignment` places `graph`, and `other` is another step of the same model, such as the prefill
    for a decode step. An operator goes to a device that already uses one of its weights or inputs;
    else to where most operators of its module are; else to where the previous operator is.
    O(operators + reads).
    """
    device_of = assignment.device_of
    of_weight = _devices_of_users(graph.weight_names, graph.uses, graph.users, device_of)
    inputs = graph.value_producer[graph.reads] < 0
    of_input = _devices_of_users(
        graph.value_names, graph.reads[inputs], graph.readers[inputs], device_of
    )
    of_module = _by_module(graph, device_of)
    homes = np.empty(other.n_ops, dtype=np.int64)
    before = int(device_of[0])
    for op in range(other.n_ops):
        weights = [other.weight_names[w] for w in other.uses_of(op).tolist()]
        values = [other.value_names[v] for v in other.reads_of(op).tolist()]
        candidate_homes = (
            *(of_weight[name] for name in weights if name in of_weight),
            *(of_input[name] for name in values if name in of_input),
        )
        home = of_module.get(other.modules[op], before)
        if candidate_homes and home not in candidate_homes[0]:
            home = candidate_homes[0][0]
        homes[op] = before = home
    return partition_by_device(other, _with_groups(other, homes))


def _with_groups(graph: OpGraph, homes: IntArray) -> IntArray:
    """Return `homes` with each group on one device, that of its first weight or operator."""
    home_of_group = {int(group): int(homes[group]) for group in np.unique(graph.group)}
    for op in reversed(graph.users.tolist()):
        home_of_group[int(graph.group[op])] = int(homes[op])
    return np.array([home_of_group[group] for group in graph.group.tolist()], dtype=np.int64)


def _devices_of_users(
    names: tuple[str, ...], used: IntArray, users: IntArray, device_of: IntArray
) -> dict[str, list[int]]:
    """Return the devices that use each name, in the order of first use."""
    homes: dict[str, dict[int, None]] = {}
    for number, op in zip(used.tolist(), users.tolist(), strict=True):
        homes.setdefault(names[number], {})[int(device_of[op])] = None
    return {name: list(devices) for name, devices in homes.items()}


def _by_module(graph: OpGraph, device_of: IntArray) -> dict[str, int]:
    """Return the device with the most operators of each module; ties go to the first."""
    counts: dict[str, Counter[int]] = {}
    for module, device in zip(graph.modules, device_of.tolist(), strict=True):
        counts.setdefault(module, Counter())[device] += 1
    return {module: count.most_common(1)[0][0] for module, count in counts.items()}
