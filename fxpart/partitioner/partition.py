"""`Partition`: operators that run on one device, and the bytes that they take there."""

from collections.abc import Collection, MutableSet

from torch.fx import Node

from fxpart.partitioner.node_sizes import SOURCES, size_of
from fxpart.partitioner.ordered_set import OrderedSet

__all__ = ["Partition", "get_extra_size_of"]


def get_extra_size_of(node: Node, nodes: Collection[Node]) -> int:
    """Return the bytes of `node` and of those operands that are not among `nodes`.

    Raises:
        CaptureError: when a node has no size.

    """
    operands = sum(size_of(n).output_size for n in node.all_input_nodes if n not in nodes)
    return size_of(node).total_size + operands


class Partition:
    """Nodes, the partitions before and after, and the devices that hold it. As in torch.

    ``used_mem_bytes`` follows `add_node` and `remove_node` without a new sum over all nodes. After
    a change of ``nodes`` itself, or of the nodes' sizes, call `recalculate_mem_size`.
    """

    def __init__(self, partition_id: int) -> None:
        self.nodes: MutableSet[Node] = OrderedSet()
        self.partition_id = partition_id
        self.parents: MutableSet[Partition] = OrderedSet()
        self.children: MutableSet[Partition] = OrderedSet()
        self.bfs_level: int = -1
        self.used_mem_bytes: int = 0
        self.logical_device_ids: list[int] = []
        self._summed: tuple[object, int, int] | None = None

    def __str__(self) -> str:
        return str(self.partition_id)

    def __repr__(self) -> str:
        return (
            f"Partition({self.partition_id}: {len(self.nodes)} nodes,"
            f" {self.used_mem_bytes} bytes, devices {self.logical_device_ids})"
        )

    def recalculate_mem_size(self) -> None:
        """Set ``used_mem_bytes`` to the sum of `get_extra_size_of` over all nodes."""
        self.set_used(sum(get_extra_size_of(node, self.nodes) for node in self.nodes))

    def set_used(self, used: int) -> None:
        """Set ``used_mem_bytes`` to what the present nodes are known to take."""
        self.used_mem_bytes = used
        if isinstance(self.nodes, OrderedSet):
            self._summed = (self.nodes, self.nodes.changes, used)

    def add_node(self, node: Node) -> None:
        """Add `node`, and the placeholders and attributes that it reads."""
        used = self._used_before()
        for operand in node.all_input_nodes:
            if operand.op in SOURCES:
                used += self._put(operand)
        self.set_used(used + self._put(node))

    def remove_node(self, node: Node) -> None:
        """Take `node` out, and the placeholders and attributes that nothing else here reads."""
        if node not in self.nodes:
            return
        used = self._used_before() - self._take(node)
        for operand in node.all_input_nodes:
            here = operand in self.nodes and operand.op in SOURCES
            if here and all(user not in self.nodes for user in operand.users):
                used -= self._take(operand)
        self.set_used(used)

    def _used_before(self) -> int:
        """Return the bytes of the present nodes, from the last sum if that still holds."""
        known = self._summed
        if known is not None and known[0] is self.nodes and isinstance(self.nodes, OrderedSet):
            if known[1] == self.nodes.changes:
                return known[2]
        elif known is None and not self.nodes:
            return 0
        return sum(get_extra_size_of(member, self.nodes) for member in self.nodes)

    def _readers(self, node: Node) -> int:
        """Return how many members read `node`, from whichever side is shorter."""
        if len(node.users) <= len(self.nodes):
            return sum(user in self.nodes for user in node.users)
        return sum(node in member.all_input_nodes for member in self.nodes)

    def _put(self, node: Node) -> int:
        """Add one node and return the bytes that it adds: its readers no longer receive it."""
        if node in self.nodes:
            return 0
        added = get_extra_size_of(node, self.nodes)
        added -= self._readers(node) * size_of(node).output_size
        self.nodes.add(node)
        return added

    def _take(self, node: Node) -> int:
        """Take one node out and return the bytes that it frees: its readers receive it now."""
        self.nodes.remove(node)
        freed = get_extra_size_of(node, self.nodes)
        return freed - self._readers(node) * size_of(node).output_size
