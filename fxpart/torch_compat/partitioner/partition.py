"""`Partition`: operators of one device and their bytes; and `OrderedSet`."""

from collections.abc import Collection, Iterable, Iterator, MutableSet
from typing import TypeVar

from torch.fx import Node

from fxpart.torch_compat.partitioner.node_sizes import SOURCES, size_of

__all__ = ["OrderedSet", "Partition", "get_extra_size_of"]


T = TypeVar("T")


class OrderedSet(MutableSet[T]):
    """An insertion-ordered set, with the methods used by code for torch's partitions.

    `changes` counts additions and removals, so that a cached value derived from the members can be
    checked for staleness.
    """

    def __init__(self, members: Iterable[T] = ()) -> None:
        self._members: dict[T, None] = dict.fromkeys(members)
        self.changes = 0

    def __contains__(self, member: object) -> bool:
        return member in self._members

    def __iter__(self) -> Iterator[T]:
        return iter(self._members)

    def __len__(self) -> int:
        return len(self._members)

    def __repr__(self) -> str:
        return f"OrderedSet({list(self._members)!r})"

    def add(self, value: T) -> None:
        """Add a member at the end if it is new."""
        if value not in self._members:
            self._members[value] = None
            self.changes += 1

    def discard(self, value: T) -> None:
        """Remove a member if present."""
        if value in self._members:
            del self._members[value]
            self.changes += 1

    def update(self, *others: Iterable[T]) -> None:
        """Add the members of all `others`."""
        for other in others:
            for member in other:
                self.add(member)

    def copy(self) -> "OrderedSet[T]":
        """Return a set with the same members in the same order."""
        return OrderedSet(self)

    def union(self, *others: Iterable[T]) -> "OrderedSet[T]":
        """Return the members of this set, then the additional ones of `others`."""
        joined = OrderedSet(self)
        joined.update(*others)
        return joined

    def intersection(self, *others: Iterable[T]) -> "OrderedSet[T]":
        """Return the members also in all `others`, in the order of this set."""
        other_sets = [set(other) for other in others]
        return OrderedSet(m for m in self if all(m in other for other in other_sets))

    def difference(self, *others: Iterable[T]) -> "OrderedSet[T]":
        """Return the members in none of `others`, in the order of this set."""
        excluded = {member for other in others for member in other}
        return OrderedSet(m for m in self if m not in excluded)

    def issubset(self, other: Iterable[T]) -> bool:
        """Return whether `other` has every member of this set."""
        others = set(other)
        return all(member in others for member in self)

    def issuperset(self, other: Iterable[T]) -> bool:
        """Return whether this set has every member of `other`."""
        return all(member in self for member in other)


def get_extra_size_of(node: Node, nodes: Collection[Node]) -> int:
    """Return the bytes of `node` and of its operands outside `nodes`.

    Raises:
        CaptureError: if a node has no size.

    """
    operands = sum(size_of(n).output_size for n in node.all_input_nodes if n not in nodes)
    return size_of(node).total_size + operands


class Partition:
    """Nodes, parent and child partitions, and devices, as in torch.

    `add_node` and `remove_node` update ``used_mem_bytes`` incrementally. After changing ``nodes``
    itself, or the nodes' sizes, call `recalculate_mem_size`.
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
        """Set ``used_mem_bytes`` to the known sum over the current nodes."""
        self.used_mem_bytes = used
        if isinstance(self.nodes, OrderedSet):
            self._summed = (self.nodes, self.nodes.changes, used)

    def add_node(self, node: Node) -> None:
        """Add `node`, and the placeholders and attributes that it reads."""
        used_bytes = self._used_before()
        for operand in node.all_input_nodes:
            if operand.op in SOURCES:
                used_bytes += self._put(operand)
        self.set_used(used_bytes + self._put(node))

    def remove_node(self, node: Node) -> None:
        """Remove `node`, and the placeholders and attributes without other readers here."""
        if node not in self.nodes:
            return
        used_bytes = self._used_before() - self._take(node)
        for operand in node.all_input_nodes:
            is_own_source = operand in self.nodes and operand.op in SOURCES
            if is_own_source and all(user not in self.nodes for user in operand.users):
                used_bytes -= self._take(operand)
        self.set_used(used_bytes)

    def _used_before(self) -> int:
        """Return the bytes of the current nodes, from the last sum if up to date."""
        cached = self._summed
        if cached is not None and cached[0] is self.nodes and isinstance(self.nodes, OrderedSet):
            if cached[1] == self.nodes.changes:
                return cached[2]
        elif cached is None and not self.nodes:
            return 0
        return sum(get_extra_size_of(member, self.nodes) for member in self.nodes)

    def _readers(self, node: Node) -> int:
        """Return the number of members that read `node`, iterating over the smaller collection."""
        if len(node.users) <= len(self.nodes):
            return sum(user in self.nodes for user in node.users)
        return sum(node in member.all_input_nodes for member in self.nodes)

    def _put(self, node: Node) -> int:
        """Add a node and return the added bytes, as its readers here no longer receive it."""
        if node in self.nodes:
            return 0
        added = get_extra_size_of(node, self.nodes)
        added -= self._readers(node) * size_of(node).output_size
        self.nodes.add(node)
        return added

    def _take(self, node: Node) -> int:
        """Remove a node and return the freed bytes, as its readers here now receive it."""
        self.nodes.remove(node)
        freed = get_extra_size_of(node, self.nodes)
        return freed - self._readers(node) * size_of(node).output_size
