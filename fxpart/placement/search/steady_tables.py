"""Tables for the steady-state loads of devices and links, for units of any size."""

from typing import NamedTuple

import numpy as np

from fxpart.core.graph import FloatArray, IntArray, grouped
from fxpart.cost.problem import Problem
from fxpart.placement.search.load_tables import LoadTables, load_tables

__all__ = ["SteadyTables", "joined_units", "steady_tables"]


class SteadyTables(NamedTuple):
    """U units, V values sent between units, D devices; for compiled code."""

    unit_start: IntArray
    """CSR by unit: its operators."""
    unit_ops: IntArray
    produced_start: IntArray
    """CSR by unit: values that it produces for others."""
    produced: IntArray
    read_start: IntArray
    """CSR by unit: values that it reads from others."""
    read: IntArray
    maker: IntArray
    """Unit that produces each value. Shape (V,)."""
    reader_start: IntArray
    """CSR by value: units that read it, except its producer."""
    readers: IntArray
    value_bytes: IntArray
    """Shape (V,)."""
    time_s: FloatArray
    """Shape (U, D)."""
    s_per_byte: FloatArray
    """Shape (D, D)."""
    link_latency_s: FloatArray
    """Shape (D, D)."""


def steady_tables(problem: Problem, unit_of: IntArray) -> SteadyTables:
    """Return the tables of units; `unit_of` (n,) is the unit of each operator, without gaps."""
    graph, costs = problem.graph, problem.costs
    units = int(unit_of.max()) + 1
    time_s = np.zeros((units, costs.op_time_s.shape[1]))
    np.add.at(time_s, unit_of, costs.op_time_s)
    sent = np.flatnonzero(graph.value_producer[graph.reads] >= 0)
    value = graph.reads[sent]
    maker, reader = unit_of[graph.value_producer[value]], unit_of[graph.readers[sent]]
    is_cut = maker != reader
    pairs = np.unique(np.stack([value[is_cut], reader[is_cut]], axis=1), axis=0)
    values, number = np.unique(pairs[:, 0], return_inverse=True)
    makers = unit_of[graph.value_producer[values]]
    count = len(values)
    produced_start, produced = grouped(makers, np.arange(count), units)
    read_start, read = grouped(pairs[:, 1], number, units)
    reader_start, readers = grouped(number, pairs[:, 1], count)
    unit_start, unit_ops = grouped(unit_of, np.arange(graph.n_ops), units)
    return SteadyTables(
        unit_start,
        unit_ops,
        produced_start,
        produced,
        read_start,
        read,
        makers.astype(np.int64),
        reader_start,
        readers,
        graph.value_bytes[values],
        time_s,
        costs.s_per_byte,
        costs.link_latency_s,
    )


def joined_units(problem: Problem, unit_of: IntArray) -> LoadTables:
    """Return the hypergraph of units for coarsening, with mean transfer times."""
    graph, costs = problem.graph, problem.costs
    units, devices = int(unit_of.max()) + 1, costs.op_time_s.shape[1]
    sent = np.flatnonzero(graph.value_producer[graph.reads] >= 0)
    value = graph.reads[sent]
    ends = np.concatenate([unit_of[graph.value_producer[value]], unit_of[graph.readers[sent]]])
    joined = np.stack([np.tile(value, 2), ends], axis=1)
    time_s = np.zeros((units, devices))
    np.add.at(time_s, unit_of, costs.op_time_s)
    off_diagonal = ~np.eye(devices, dtype=np.bool_)
    mean_s = 0.0
    output_s = np.zeros(graph.n_values)
    if devices > 1:
        mean_s = float(costs.s_per_byte[off_diagonal].mean())
        output_s = costs.link_latency_s[off_diagonal].mean() + graph.value_bytes * mean_s
    size = np.zeros(units, dtype=np.int64)
    used = np.unique(np.stack([unit_of[graph.users], graph.uses], axis=1), axis=0)
    np.add.at(size, used[:, 0], problem.memory.weight_bytes[used[:, 1]])
    room, pays = problem.topology.memory_bytes, np.ones(devices, dtype=np.bool_)
    return load_tables(joined, output_s, time_s, size, room, pays)
