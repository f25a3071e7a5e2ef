"""Bytes in use while the nodes of a graph are run in another order: `MemoryTracker`."""

from collections.abc import Callable

import torch
from torch import fx

from fxpart.errors import SpecError, nearest_names
from fxpart.memory.profile import releasable_storages
from fxpart.memory.storages import graph_storages, is_input
from fxpart.memory.tensors import SizeOf

__all__ = ["MemoryTracker", "is_no_primal"]


def is_no_primal(node: fx.Node) -> bool:
    """Return whether a node is no input of a forward, as torch names those."""
    return not node.name.startswith("primals")


class MemoryTracker:
    """Follows a schedule of a graph: any order in which a node comes after what it reads.

    The graph itself stays as it is. A step takes time in proportion to the node's operands and
    results. Writes in place are not ordered here: that is for who makes the schedule.
    """

    def __init__(
        self,
        graph: fx.Graph,
        is_releasable: Callable[[fx.Node], bool] | None = None,
        device_filter: Callable[[torch.device], bool] | None = None,
        size_of: SizeOf | None = None,
    ) -> None:
        """Start with the inputs of `graph` in memory.

        Args:
            graph: nodes carry ``meta["val"]``.
            is_releasable: see `build_memory_profile`; by default all but those whose name begins
                with ``primals``.
            device_filter: which devices' storages count; by default all.
            size_of: see `build_memory_profile`.

        """
        self.graph = graph
        self._storages = graph_storages(graph)
        counted = [
            device_filter is None or device_filter(tensor.device)
            for tensor in self._storages.tensors
        ]
        sizes = self._storages.sizes(size_of)
        self._sizes = [size if wanted else 0 for size, wanted in zip(sizes, counted, strict=True)]
        self._releasable = releasable_storages(self._storages.makers, is_releasable or is_no_primal)
        nodes = self._storages.nodes
        self._unread = [len(node.users) for node in nodes]
        self._holders = [0] * len(sizes)
        self._waiting = [True] * len(nodes)
        self._ready = [is_input(node) for node in nodes]
        self.current_memory_bytes = 0
        self.peak_memory = 0
        for place, node in enumerate(nodes):
            if is_input(node):
                self._allocate(place)

    def get_current_memory_bytes(self) -> int:
        """Return the bytes in use now."""
        return self.current_memory_bytes

    def schedule_node(self, node: fx.Node) -> None:
        """Run `node` next. Inputs may be given too, and change nothing.

        Raises:
            SpecError: for a node of another graph, one that was scheduled before, or one that
                reads what was not.

        """
        place = self._place(node)
        if not self._waiting[place]:
            raise SpecError(f"node {node.name} was scheduled before; schedule each node once")
        operands = self._storages.operands[place]
        late = [self._storages.nodes[at].name for at in operands if not self._ready[at]]
        if late:
            raise SpecError(
                f"node {node.name} cannot be scheduled before what it reads: {', '.join(late)};"
                " schedule those first"
            )
        self._waiting[place] = False
        self._ready[place] = True
        if is_input(node) or node.op == "output":
            return
        self._allocate(place)
        for operand in operands:
            self._read(operand)
        if not node.users:
            self._let_go(place)

    def _place(self, node: fx.Node) -> int:
        place = self._storages.position.get(node)
        if place is None:
            names = (other.name for other in self._storages.nodes)
            raise SpecError(
                f"node {node.name} is not in the graph ({nearest_names(node.name, names)})"
            )
        return place

    def _allocate(self, place: int) -> None:
        for storage in self._storages.made[place]:
            self.current_memory_bytes += self._sizes[storage]
        for storage in self._storages.held[place]:
            self._holders[storage] += 1
        self.peak_memory = max(self.peak_memory, self.current_memory_bytes)

    def _read(self, place: int) -> None:
        # The output reads too, but never runs to its end: what it reads stays.
        self._unread[place] -= 1
        if self._unread[place] == 0:
            self._let_go(place)

    def _let_go(self, place: int) -> None:
        for storage in self._storages.held[place]:
            self._holders[storage] -= 1
            if self._holders[storage] == 0 and self._releasable[storage]:
                self.current_memory_bytes -= self._sizes[storage]
