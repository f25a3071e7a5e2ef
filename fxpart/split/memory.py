"""Which values of a graph may share memory: a union of nodes that grows along the graph."""

import operator
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.fx import Node
from torch.utils._pytree import tree_leaves

__all__ = ["SharedMemory", "Value", "storages"]

Value = Node | tuple[str, int]
"""A node, or a storage: where it comes from, and its number there."""


def storages(label: str, value: object) -> list[Value]:
    """Return the storages of the tensors in a nested value; what has none stands for itself."""
    found: list[Value] = []
    for leaf in tree_leaves(value):
        if isinstance(leaf, Tensor):
            # Sparse tensors have no one storage.
            strided = leaf.layout is torch.strided
            found.append((label, int(leaf.untyped_storage()._cdata) if strided else id(leaf)))
    return found


class SharedMemory:
    """Which values may share memory. Operators are entered in graph order."""

    def __init__(self) -> None:
        self._above: dict[Value, Value] = {}
        self._items: dict[Node, dict[object, Node]] = {}
        """Of results whose items are apart: the first node of each item, by its place."""

    def root(self, value: Value) -> Value:
        """Return the value that stands for all that may share memory with `value`."""
        while (above := self._above.get(value, value)) != value:
            self._above[value] = self._above.get(above, above)
            value = above
        return value

    def join(self, a: Value, b: Value) -> None:
        """Let two values, and what shares memory with them, be one."""
        top, other = self.root(a), self.root(b)
        if top != other:
            self._above[other] = top

    def hold(self, node: Node, label: str, value: object) -> None:
        """Let `node` be one with all that holds the same tensors under the same label."""
        if node not in self._items:
            for storage in storages(label, value):
                self.join(storage, node)

    def enter(self, node: Node, shared: Sequence[Node]) -> None:
        """Let `node` be one with the operands that its result may share memory with.

        A new result of several tensors, such as that of ``topk``, is not one memory: a write into
        one item leaves the others as they were. Its items are not joined by way of the whole.
        """
        if not shared and _has_items_apart(node):
            self._items[node] = {}
        for operand in shared:
            if operand in self._items:
                self.join(self._items[operand].setdefault(node.args[1], node), node)
            else:
                self.join(operand, node)


def _has_items_apart(node: Node) -> bool:
    """Return whether a new result is only used item by item, and no two share memory.

    That holds for a tensor too: its rows do not overlap. Where capture left what the result was,
    that is asked as well.
    """
    for user in node.users:
        if user.target is not operator.getitem or user.args[0] is not node:
            return False
        place = user.args[1]
        if type(place) is not int or place < 0:
            return False
    held = storages("", node.meta.get("val"))
    return bool(node.users) and len(set(held)) == len(held)
