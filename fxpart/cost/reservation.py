"""Memory that torch's allocator reserves on a device while a graph runs for several steps."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fxpart.core.graph import IntArray, OpGraph
from fxpart.cost.caching_allocator import run_allocator
from fxpart.cost.storage_kinds import KINDS, Storages

__all__ = ["Reservation", "reservation"]

_WEIGHT, _STATE, _CACHE, _INPUT = map(
    KINDS.index, ("weight", "optimizer state", "kv cache", "input")
)


@dataclass(frozen=True, slots=True)
class Reservation:
    """Peaks of the memory that the allocator hands out, and that it reserves."""

    allocated_bytes: int
    """Peak of blocks in use, including kernel workspaces."""
    reserved_bytes: int


def reservation(
    graph: OpGraph,
    storages: Storages,
    workspace_bytes: IntArray,
    limit_bytes: float = math.inf,
) -> Reservation:
    """Simulate the allocator for two runs of `graph` with the `storages` of one device.

    Weights and caches are resident. The inputs, gradients and results of a step are freed when the
    next one begins; optimizer state is allocated by the first update. Each operator allocates its
    results, has its workspace while it runs, and then frees the storages that it was the last to
    need. O(storages x free blocks).

    Args:
        graph: the graph to run.
        storages: all storages on the device.
        workspace_bytes: workspace of each operator on the device; shape (n,).
        limit_bytes: memory available to the allocator; near it, cached memory is released. If that
            is not enough, the result is that of a device on which it is.

    """
    size_bytes, events = _events(graph, storages, workspace_bytes)
    run = run_allocator(size_bytes, events, limit_bytes)
    if run.reserved_bytes.max(initial=0) > limit_bytes:
        run = run_allocator(size_bytes, events)
    return Reservation(
        int(run.allocated_bytes.max(initial=0)), int(run.reserved_bytes.max(initial=0))
    )


def _events(
    graph: OpGraph, storages: Storages, workspace_bytes: IntArray
) -> tuple[IntArray, IntArray]:
    """Return the sizes of storages and workspaces, and their events as `run_allocator` takes them.

    Workspaces follow the storages.
    """
    kind, n_ops = storages.kind, graph.n_ops
    is_present = storages.size_bytes > 0
    with_workspace = np.flatnonzero(workspace_bytes)
    workspaces = len(kind) + np.arange(len(with_workspace))
    resident = np.flatnonzero(is_present & np.isin(kind, (_WEIGHT, _CACHE)))
    states = np.flatnonzero(is_present & (kind == _STATE))
    inputs = np.flatnonzero(is_present & (kind == _INPUT))
    results = np.flatnonzero(is_present & ~np.isin(kind, (_WEIGHT, _CACHE, _STATE, _INPUT)))
    born, last = storages.born[results], storages.last[results]
    is_freed = last < n_ops - 1
    is_update = graph.is_update
    first_update = int(np.argmax(is_update)) if is_update.any() else n_ops
    # The events of an operator, in this order.
    of_operator = (
        (states, np.full(len(states), first_update)),
        (results, born),
        (workspaces, with_workspace),
        (~workspaces, with_workspace),
        (~results[is_freed], last[is_freed]),
    )
    first_step, second_step = (_in_order(lists) for lists in (of_operator, of_operator[1:]))
    kept = results[~is_freed]
    freed = ~np.concatenate([inputs, kept[np.argsort(born[~is_freed], kind="stable")]])
    sizes = np.concatenate([storages.size_bytes, workspace_bytes[with_workspace]])
    # The second step reuses the memory freed by the first, as all later ones do.
    steps = (resident, inputs, first_step, freed, inputs, second_step)
    return sizes, np.concatenate(steps)


def _in_order(lists: Sequence[tuple[IntArray, IntArray]]) -> IntArray:
    """Return all events in the order of their operators; those of one in the order of `lists`."""
    events, operators = (np.concatenate(columns) for columns in zip(*lists, strict=True))
    return events[np.argsort(operators, kind="stable")]
