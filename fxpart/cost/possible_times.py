"""Devices on which each operator fits, and a duality bound on total work."""

import numpy as np

from fxpart.core.graph import FloatArray, IntArray
from fxpart.cost.problem import Problem

__all__ = ["needed_bytes", "possible_s", "transient_bytes", "work_shares"]


def possible_s(problem: Problem) -> FloatArray:
    """Return the operator times (n, D), infinite for groups that do not fit a device.

    A group that fits nowhere keeps its times, as no placement is feasible then anyway.
    """
    group, times = problem.graph.group, problem.costs.op_time_s
    needed = needed_bytes(problem)
    of_group = np.zeros(len(group), dtype=np.int64)
    np.maximum.at(of_group, group, needed)
    fits = of_group[group][:, None] <= problem.topology.memory_bytes[None, :]
    fits_anywhere = np.asarray(fits.any(axis=1))
    return np.where(fits | ~fits_anywhere[:, None], times, np.inf)


def needed_bytes(problem: Problem) -> IntArray:
    """Return a lower bound of the memory in use while each operator runs. Shape (n,).

    It counts the weights and model inputs of its group, the operator's results, and its operands
    except views, whose storage may be shared.
    """
    graph, m = problem.graph, problem.memory
    reader = np.repeat(np.arange(graph.n_ops), np.diff(m.read_start))
    is_input = m.producer[m.reads] < 0
    group_bytes = np.zeros(graph.n_ops, dtype=np.int64)
    for ops, items, item_bytes in (
        (graph.users, m.uses, m.weight_bytes),
        (reader[is_input], m.reads[is_input], m.alloc_bytes),
    ):
        distinct = np.unique(np.stack([graph.group[ops], items], axis=1), axis=0)
        np.add.at(group_bytes, distinct[:, 0], item_bytes[distinct[:, 1]])
    return np.asarray(group_bytes[graph.group] + transient_bytes(problem), dtype=np.int64)


def transient_bytes(problem: Problem) -> IntArray:
    """Return a lower bound of the live bytes on its device while each operator runs. Shape (n,).

    Counted are its results, and its operands except views, whose storage may be another value's,
    and inputs of the model.
    """
    graph, m = problem.graph, problem.memory
    reader = np.repeat(np.arange(graph.n_ops), np.diff(m.read_start))
    op_bytes = np.zeros(graph.n_ops, dtype=np.int64)
    read = (m.producer[m.reads] >= 0) & (m.base[m.reads] < 0)
    values = m.reads[read]
    np.add.at(op_bytes, reader[read], np.minimum(m.alloc_bytes[values], m.value_bytes[values]))
    produced = np.flatnonzero((m.producer >= 0) & (m.base < 0))
    np.add.at(op_bytes, m.producer[produced], m.alloc_bytes[produced])
    return op_bytes


def work_shares(op_time_s: FloatArray) -> FloatArray:
    """Return device shares proportional to speed on the whole model; all 0 if a total time is 0.

    They sum to 1, and are 0 for a device with infinite times. By linear programming duality, any
    placement has a largest load of at least the sum over operators of the minimum of ``share *
    time`` over devices. Shape (D,).
    """
    totals = op_time_s.sum(axis=0)
    if not (totals > 0).all():
        return np.zeros_like(totals)
    return np.asarray((1.0 / totals) / (1.0 / totals).sum())
