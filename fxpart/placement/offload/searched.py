"""What a mode is given to place, where some of a model lies in tiers."""

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
    """Return what a mode places, and what each device has for it.

    Offloaded weights count nothing, nor does the cache of modules on the host.
    """
    graph, base = machine.problem.graph, machine.problem
    gone, hosted = _in_tiers(machine, ways), hosted_ops(machine, ways)
    read_elsewhere = np.zeros(graph.n_values, dtype=np.bool_)
    read_elsewhere[graph.reads[~hosted[graph.readers]]] = True
    inputs = (graph.value_producer < 0) & ~read_elsewhere
    inputs[machine.tier_caches(ways)] = True
    bare = replace(
        graph,
        weight_bytes=np.where(gone, 0, graph.weight_bytes),
        value_alloc_bytes=np.where(inputs, 0, graph.value_alloc_bytes),
    )
    room = most_buffer(machine, ways)
    topology = with_less(base.topology, room)
    costs = base.costs._replace(op_time_s=_times_with_waits(machine, ways, hosted))
    problem = replace(base, graph=bare, topology=topology, costs=costs, memory=memory_tables(bare))
    return problem, topology.memory_bytes.tolist()


def _times_with_waits(machine: Machine, ways: IntArray, hosted: BoolArray) -> FloatArray:
    """Return the times of operators on the devices, shape (n, D); of `hosted` ones on the host.

    The time that a copy is waited for is in that of the first operator which needs it.
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
    """Return the room for copies that any device may need."""
    sizes = machine.tier_sizes(ways)
    if not machine.options.overlap:
        largest = [
            (unit.largest_bytes if way == STREAMED else 0, cached if way != HOSTED else 0)
            for unit, way, cached in zip(machine.units, ways, machine.cache_sizes, strict=True)
        ]
        return max((sum(both) for both in largest), default=0)
    return max((a + b for a, b in pairwise([0, *sizes[sizes > 0].tolist()])), default=0)


def _in_tiers(machine: Machine, ways: IntArray) -> BoolArray:
    """Return which weights lie in a tier, shape (W,)."""
    gone = np.zeros(len(machine.problem.graph.weight_names), dtype=np.bool_)
    for unit in np.flatnonzero(ways != RESIDENT).tolist():
        gone[machine.units[unit].weights] = True
    return gone


def hosted_ops(machine: Machine, ways: IntArray) -> BoolArray:
    """Return which operators run on the host: those of hosted units."""
    hosted = np.zeros(machine.problem.graph.n_ops, dtype=np.bool_)
    for unit in np.flatnonzero(ways == HOSTED).tolist():
        hosted[machine.units[unit].ops] = True
    return hosted
