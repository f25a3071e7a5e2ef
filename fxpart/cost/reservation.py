"""Memory that torch's allocator reserves on a device while a graph runs for several steps."""

import math
from collections import defaultdict
from dataclasses import dataclass

import numpy as np

from fxpart.core.graph import IntArray, OpGraph
from fxpart.cost.caching_allocator import CachingAllocator
from fxpart.cost.storage_kinds import KINDS, Storages

__all__ = ["Reservation", "reservation"]

_STEPS = 2
"""Number of steps after which a step reuses the memory freed by the previous one."""
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
        limit_bytes: memory available to the allocator; near it, cached memory is released.

    """
    run = _Run(graph, storages, workspace_bytes, CachingAllocator(limit_bytes))
    for step in range(_STEPS):
        run.step(first=step == 0)
    return Reservation(run.most_bytes, run.allocator.most_reserved_bytes)


class _Run:
    """A process that runs steps one after the other."""

    def __init__(
        self,
        graph: OpGraph,
        storages: Storages,
        workspace_bytes: IntArray,
        allocator: CachingAllocator,
    ) -> None:
        self.allocator = allocator
        self.most_bytes = 0
        self._workspace_bytes = {
            op: int(workspace_bytes[op]) for op in np.flatnonzero(workspace_bytes).tolist()
        }
        self._size = storages.size_bytes.tolist()
        self._states: list[int] = []
        self._inputs: list[int] = []
        self._made: dict[int, list[int]] = defaultdict(list)
        self._ends: dict[int, list[int]] = defaultdict(list)
        self._kept: list[int] = []
        updates = np.flatnonzero(graph.is_update)
        self._first_update = int(updates[0]) if len(updates) else -1
        for index, kind in enumerate(storages.kind.tolist()):
            if not self._size[index]:
                continue
            if kind in (_WEIGHT, _CACHE):
                self._take(index)
            elif kind == _STATE:
                self._states.append(index)
            elif kind == _INPUT:
                self._inputs.append(index)
            else:
                self._made[int(storages.born[index])].append(index)
                if storages.last[index] < graph.n_ops - 1:
                    self._ends[int(storages.last[index])].append(index)
        events = {*self._made, *self._ends, *self._workspace_bytes, self._first_update}
        self._operators = sorted(events - {-1})

    def step(self, *, first: bool) -> None:
        """Run the graph once."""
        for address in self._kept:
            self.allocator.free(address)
        inputs = [self._take(index) for index in self._inputs]
        present: dict[int, int] = {}
        for op in self._operators:
            if first and op == self._first_update:
                for index in self._states:
                    self._take(index)
            for index in self._made.get(op, ()):
                present[index] = self._take(index)
            if op in self._workspace_bytes:
                workspace = self.allocator.allocate(self._workspace_bytes[op])
                self._note()
                self.allocator.free(workspace)
            for index in self._ends.get(op, ()):
                self.allocator.free(present.pop(index))
        self._kept = [*inputs, *present.values()]

    def _take(self, index: int) -> int:
        address = self.allocator.allocate(self._size[index])
        self._note()
        return address

    def _note(self) -> None:
        self.most_bytes = max(self.most_bytes, self.allocator.allocated_bytes)
