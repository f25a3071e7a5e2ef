"""On which devices each operator fits, and what all of them take together at least."""

import numpy as np

from fxpart.core.graph import FloatArray, IntArray
from fxpart.cost.problem import Problem

__all__ = ["needed_bytes", "possible_s", "work_shares"]


def possible_s(problem: Problem) -> FloatArray:
    """Return the times of operators (n, D), infinite where a group does not fit a device.

    Where it fits nowhere, all its times are as they are: what such a placement costs is no matter.
    """
    group, times = problem.graph.group, problem.costs.op_time_s
    needed = needed_bytes(problem)
    of_group = np.zeros(len(group), dtype=np.int64)
    np.maximum.at(of_group, group, needed)
    fits = of_group[group][:, None] <= problem.topology.memory_bytes[None, :]
    somewhere = np.asarray(fits.any(axis=1))
    return np.where(fits | ~somewhere[:, None], times, np.inf)


def needed_bytes(problem: Problem) -> IntArray:
    """Return bytes that a device holds for certain while it runs each operator. Shape (n,).

    The weights of its group and the model's inputs that the group reads; what the operator makes,
    and what it reads unless that is a view, whose storage may be another's.
    """
    graph, m = problem.graph, problem.memory
    reader = np.repeat(np.arange(graph.n_ops), np.diff(m.read_start))
    is_input = m.producer[m.reads] < 0
    stays = np.zeros(graph.n_ops, dtype=np.int64)
    for ops, items, item_bytes in (
        (graph.users, m.uses, m.weight_bytes),
        (reader[is_input], m.reads[is_input], m.alloc_bytes),
    ):
        once = np.unique(np.stack([graph.group[ops], items], axis=1), axis=0)
        np.add.at(stays, once[:, 0], item_bytes[once[:, 1]])
    alive = np.zeros(graph.n_ops, dtype=np.int64)
    read = ~is_input & (m.base[m.reads] < 0)
    values = m.reads[read]
    np.add.at(alive, reader[read], np.minimum(m.alloc_bytes[values], m.value_bytes[values]))
    made = np.flatnonzero((m.producer >= 0) & (m.base < 0))
    np.add.at(alive, m.producer[made], m.alloc_bytes[made])
    return np.asarray(stays[graph.group] + alive, dtype=np.int64)


def work_shares(op_time_s: FloatArray) -> FloatArray:
    """Return shares of the devices by their speed on the whole model, zeros where one is infinite.

    They add to 1. Any placement takes at least the sum over operators of the least ``share *
    time``: of all devices together, by linear programming duality. Shape (D,).
    """
    totals = op_time_s.sum(axis=0)
    if not (totals > 0).all():
        return np.zeros_like(totals)
    return np.asarray((1.0 / totals) / (1.0 / totals).sum())
