"""Live bytes along a graph, in graph order or another: `build_memory_profile`, `MemoryTracker`."""

from collections.abc import Callable

import torch
from torch import fx

from fxpart.errors import SpecError, nearest_names
from fxpart.torch_compat.memory.storages import GraphStorages, graph_storages, is_input
from fxpart.torch_compat.memory.tensors import SizeOf

__all__ = [
    "MemoryTracker",
    "build_memory_profile",
    "memory_profile",
]


def build_memory_profile(
    graph: fx.Graph,
    is_releasable: Callable[[fx.Node], bool],
    size_of: SizeOf | None = None,
) -> list[int]:
    """Return the live bytes along a run of `graph` in graph order.

    The first entry is that of the inputs (placeholders and attributes, each storage once). Each
    operator adds two entries: after allocating its results, and after freeing the storages it was
    the last to read. The results of the graph stay. Near-linear in nodes, edges and results.

    Args:
        graph: nodes have ``meta["val"]``, as an export leaves it.
        is_releasable: whether the storage of this node's result, or of this input, may be freed
            after its last use. If several inputs share a storage, all must allow it. Not called for
            attributes, which their module keeps.
        size_of: returns the number for a possibly symbolic size in bytes; by default, its value at
            the example inputs.

    Raises:
        CaptureError: if a node has no ``meta["val"]``, or a size has no number.

    """
    return memory_profile(graph_storages(graph), is_releasable, size_of)


def memory_profile(
    storages: GraphStorages,
    is_releasable: Callable[[fx.Node], bool],
    size_of: SizeOf | None = None,
) -> list[int]:
    """Return the `build_memory_profile` of a graph, given its storages."""
    sizes = storages.sizes(size_of)
    releasable = _releasable_storages(storages.makers, is_releasable)
    steps = list(zip(storages.nodes, storages.created, storages.freed_by(), strict=True))
    current = sum(sizes[s] for node, allocated, _ in steps if is_input(node) for s in allocated)
    profile = [current]
    for node, allocated, freed in steps:
        if is_input(node) or node.op == "output":
            continue
        current += sum(sizes[s] for s in allocated)
        profile.append(current)
        current -= sum(sizes[s] for s in freed if releasable[s])
        profile.append(current)
    return profile


def _releasable_storages(
    makers: list[list[fx.Node]], is_releasable: Callable[[fx.Node], bool]
) -> list[bool]:
    """Return whether each storage may be freed, given its makers."""
    return [
        all(node.op != "get_attr" and is_releasable(node) for node in nodes) for nodes in makers
    ]


def _is_no_primal(node: fx.Node) -> bool:
    """Return whether a node does not have torch's name for an input of a forward."""
    return not node.name.startswith("primals")


class MemoryTracker:
    """Tracks the memory of a schedule of a graph, any order in which nodes follow their operands.

    The graph itself is not changed. A step takes O(operands + results). Ordering in-place writes is
    left to the caller's schedule.
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
            graph: nodes have ``meta["val"]``.
            is_releasable: see `build_memory_profile`; by default true for all nodes except those
                whose name begins with ``primals``.
            device_filter: whether storages on a device count; by default all do.
            size_of: see `build_memory_profile`.

        """
        self.graph = graph
        self._storages = graph_storages(graph)
        counted = [
            device_filter is None or device_filter(tensor.device)
            for tensor in self._storages.tensors
        ]
        sizes = self._storages.sizes(size_of)
        self._sizes = [
            size if is_counted else 0 for size, is_counted in zip(sizes, counted, strict=True)
        ]
        self._releasable = _releasable_storages(
            self._storages.makers, is_releasable or _is_no_primal
        )
        nodes = self._storages.nodes
        self._unread = [len(node.users) for node in nodes]
        self._holders = [0] * len(sizes)
        self._unscheduled = [True] * len(nodes)
        self._ready = [is_input(node) for node in nodes]
        self.current_memory_bytes = 0
        self.peak_memory = 0
        for position, node in enumerate(nodes):
            if is_input(node):
                self._allocate(position)

    def get_current_memory_bytes(self) -> int:
        """Return the current live bytes."""
        return self.current_memory_bytes

    def schedule_node(self, node: fx.Node) -> None:
        """Run `node` next. Inputs are accepted and have no effect.

        Raises:
            SpecError: if the node is from another graph, was already scheduled, or reads a node
                that was not.

        """
        position = self._storages.position.get(node)
        if position is None:
            names = (known_node.name for known_node in self._storages.nodes)
            raise SpecError(
                f"node {node.name} is not in the graph ({nearest_names(node.name, names)})"
            )
        if not self._unscheduled[position]:
            raise SpecError(f"node {node.name} was scheduled before; schedule each node once")
        operands = self._storages.operands[position]
        late = [self._storages.nodes[index].name for index in operands if not self._ready[index]]
        if late:
            raise SpecError(
                f"node {node.name} cannot be scheduled before what it reads: {', '.join(late)};"
                " schedule those first"
            )
        self._unscheduled[position] = False
        self._ready[position] = True
        if is_input(node) or node.op == "output":
            return
        self._allocate(position)
        for operand in operands:
            # The output counts as a user but never reads, so results stay.
            self._unread[operand] -= 1
            if self._unread[operand] == 0:
                self._free(operand)
        if not node.users:
            self._free(position)

    def _allocate(self, position: int) -> None:
        for storage in self._storages.created[position]:
            self.current_memory_bytes += self._sizes[storage]
        for storage in self._storages.in_result[position]:
            self._holders[storage] += 1
        self.peak_memory = max(self.peak_memory, self.current_memory_bytes)

    def _free(self, position: int) -> None:
        for storage in self._storages.in_result[position]:
            self._holders[storage] -= 1
            if self._holders[storage] == 0 and self._releasable[storage]:
                self.current_memory_bytes -= self._sizes[storage]
