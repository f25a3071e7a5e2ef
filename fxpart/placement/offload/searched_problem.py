"""The problem given to a mode when part of a model is offloaded."""

from dataclasses import replace
from itertools import pairwise

import numpy as np

from fxpart.core.graph import FloatArray, IntArray
from fxpart.cost.problem import Problem
from fxpart.cost.tables import memory_tables
from fxpart.placement.offload.machine import BoolArray, Machine, with_less
from fxpart.placement.offload.units import HOSTED, RESIDENT, STREAMED

__all__ = ["hosted_ops", "most_buffer", "searched_problem"]


def searched_problem(machine: Machine, ways: IntArray) -> tuple[Problem, list[int]]:
    """Return the problem for the mode, and the memory of each device.

    Offloaded weights, and the caches of modules on the host, take no memory in it.
    """
    graph, base = machine.problem.graph, machine.problem
    is_offloaded, hosted = _in_tiers(machine, ways), hosted_ops(machine, ways)
    read_elsewhere = np.zeros(graph.n_values, dtype=np.bool_)
    read_elsewhere[graph.reads[~hosted[graph.readers]]] = True
    inputs = (graph.value_producer < 0) & ~read_elsewhere
    inputs[machine.tier_caches(ways)] = True
    bare = replace(
        graph,
        weight_bytes=np.where(is_offloaded, 0, graph.weight_bytes),
        value_alloc_bytes=np.where(inputs, 0, graph.value_alloc_bytes),
    )
    buffer = most_buffer(machine, ways)
    topology = with_less(base.topology, buffer)
    costs = base.costs._replace(op_time_s=_times_with_waits(machine, ways, hosted))
    problem = replace(base, graph=bare, topology=topology, costs=costs, memory=memory_tables(bare))
    return problem, topology.memory_bytes.tolist()


def _times_with_waits(machine: Machine, ways: IntArray, hosted: BoolArray) -> FloatArray:
    """Return the times of operators on the devices, or on the host for `hosted` ones. Shape (n, D).

    Stalls for a copy are added to the first operator that needs it.
    """
    times = machine.problem.costs.op_time_s.copy()
    if hosted.any():
        times[hosted] = machine.with_host.costs.op_time_s[hosted, -1:]
    since, previous = 0.0, -1
    op_s = times.min(axis=1)
    sizes = machine.tier_sizes(ways)
    for index in np.flatnonzero(sizes).tolist():
        first = int(machine.units[index].ops[0])
        if machine.options.overlap and previous >= 0:
            since = float(op_s[previous:first].sum())
        copy_s = float(sizes[index]) / machine.copied_bytes_per_s
        times[first] += max(0.0, copy_s - since)
        previous = first
    return times


def most_buffer(machine: Machine, ways: IntArray) -> int:
    """Return the largest copy buffer that a device may need."""
    sizes = machine.tier_sizes(ways)
    if not machine.options.overlap:
        largest = [
            (unit.largest_bytes if way == STREAMED else 0, cached if way != HOSTED else 0)
            for unit, way, cached in zip(machine.units, ways, machine.cache_sizes, strict=True)
        ]
        return max((sum(both) for both in largest), default=0)
    return max((a + b for a, b in pairwise([0, *sizes[sizes > 0].tolist()])), default=0)


def _in_tiers(machine: Machine, ways: IntArray) -> BoolArray:
    """Return which weights are offloaded, shape (W,)."""
    is_offloaded = np.zeros(len(machine.problem.graph.weight_names), dtype=np.bool_)
    for unit in np.flatnonzero(ways != RESIDENT).tolist():
        is_offloaded[machine.units[unit].weights] = True
    return is_offloaded


def hosted_ops(machine: Machine, ways: IntArray) -> BoolArray:
    """Return which operators run on the host."""
    hosted = np.zeros(machine.problem.graph.n_ops, dtype=np.bool_)
    for unit in np.flatnonzero(ways == HOSTED).tolist():
        hosted[machine.units[unit].ops] = True
    return hosted
