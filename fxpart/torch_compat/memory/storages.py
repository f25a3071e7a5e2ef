"""`GraphStorages`: storages created, shared and freed by the nodes of an fx graph.

A result shares the storage of an operand when their ``meta["val"]`` do, or when the operator's
schema guarantees it. So graphs read from a file, where each node has its own storage, work too. A
storage that a node shares with no operand is its own, even if its metadata was copied from another
node.
"""

import operator
from dataclasses import dataclass, field
from functools import cache

from torch import Tensor, fx
from torch._C import DispatchKey
from torch._ops import OpOverload

from fxpart.errors import CaptureError
from fxpart.torch_compat.memory.tensors import (
    SizeOf,
    hinted_bytes,
    storage_number,
    tensors_with_memory,
)

__all__ = ["NEVER", "GraphStorages", "graph_storages", "is_input"]


NEVER = -1
"""Position of the freeing node for a storage that is never freed."""


# Results that share the memory of an operand by the operator's schema.


def _operand_of_result(node: fx.Node, result: int, item: int) -> fx.Node | None:
    """Return the operand that result number `result` of a node is a view of, or is written into.

    For results or operands that are lists, `item` is the index there. None if the schema does not
    guarantee it: ``reshape`` or ``to`` return their operand or a copy.
    """
    target = node.target
    if not isinstance(target, OpOverload):
        return None
    sources = _sources(target)
    if result >= len(sources) or sources[result] is None:
        return None
    position, name = sources[result] or (0, "")
    operand = node.args[position] if position < len(node.args) else node.kwargs.get(name)
    if isinstance(operand, list | tuple):
        operand = operand[item] if item < len(operand) else None
    return operand if isinstance(operand, fx.Node) else None


@cache
def _sources(operator: OpOverload) -> tuple[tuple[int, str] | None, ...]:
    """Return, for each result, the position and name of the operand whose memory it shares."""
    schema = operator._schema
    operands = [
        (position, argument.name, argument.alias_info)
        for position, argument in enumerate(schema.arguments)
        if argument.alias_info is not None
    ]
    composite = operator.has_kernel_for_dispatch_key(DispatchKey.CompositeImplicitAutograd)
    view = operator.is_view and not composite and len(operands) == 1
    sources: list[tuple[int, str] | None] = []
    for result in schema.returns:
        alias = result.alias_info
        source = None
        if alias is not None and alias.is_write:
            aliased = [o for o in operands if o[2].before_set & alias.before_set]
            source = aliased[0][:2] if aliased else None
        elif alias is not None and view:
            source = operands[0][:2]
        sources.append(source)
    return tuple(sources)


# Storages of a graph.


def is_input(node: fx.Node) -> bool:
    """Return whether a node is an input, whose tensors exist from the start."""
    return node.op in {"placeholder", "get_attr"}


@dataclass(frozen=True, eq=False, slots=True)
class GraphStorages:
    """Storages, numbered in order of creation, and the nodes that use them.

    Lists by node have one item per node, in graph order.
    """

    nodes: list[fx.Node] = field(default_factory=list)
    position: dict[fx.Node, int] = field(default_factory=dict)
    """Position of each node in the lists."""
    operands: list[list[int]] = field(default_factory=list)
    """Positions of each node's operands, each once."""
    created: list[list[int]] = field(default_factory=list)
    """Storages that first occur at each node, including inputs."""
    in_result: list[list[int]] = field(default_factory=list)
    """Storages in each node's result, each once."""
    tensors: list[Tensor] = field(default_factory=list)
    """A tensor in each storage."""
    makers: list[list[fx.Node]] = field(default_factory=list)
    """For each storage, the node that creates it, or the inputs that share it."""
    in_storage: list[dict[int, int]] = field(default_factory=list)
    """Storages of each node by `storage_number`; for an attribute, also by its real number."""

    def sizes(self, size_of: SizeOf | None = None) -> list[int]:
        """Return the bytes of each storage."""
        number_of = size_of or hinted_bytes
        return [number_of(tensor.untyped_storage().nbytes()) for tensor in self.tensors]

    def storages_of(self, nodes: list[fx.Node]) -> list[int]:
        """Return the storages in the results of `nodes`."""
        return [storage for node in nodes for storage in self.in_result[self.position[node]]]

    def freed_by(self) -> list[list[int]]:
        """Return, for each node, the storages that no later node needs.

        Results of the graph and unread inputs are needed to the end. An operator whose result is
        not read frees it itself. O(nodes + edges + results).
        """
        last = [NEVER if is_input(node) else position for position, node in enumerate(self.nodes)]
        is_result = [is_input(node) for node in self.nodes]
        for position, node in enumerate(self.nodes):
            for operand in self.operands[position]:
                last[operand] = position
                is_result[operand] = node.op == "output"
        ends = [NEVER] * len(self.tensors)
        forever = [False] * len(self.tensors)
        for position, storages in enumerate(self.in_result):
            for storage in storages:
                ends[storage] = max(ends[storage], last[position])
                forever[storage] |= is_result[position]
        released: list[list[int]] = [[] for _ in self.nodes]
        for storage, end in enumerate(ends):
            if not forever[storage]:
                released[end].append(storage)
        return released


def graph_storages(graph: fx.Graph) -> GraphStorages:
    """Return the storages of `graph`, whose nodes have ``meta["val"]``.

    Memory inside graphs that operators run (branches, loops) does not count.

    Raises:
        CaptureError: if a node that is read has no ``meta["val"]``, or comes after one of its
            readers.

    """
    return _Walk().over(graph)


@dataclass(eq=False)
class _Walk:
    """Adds nodes one by one."""

    storages: GraphStorages = field(default_factory=GraphStorages)
    known: set[int] = field(default_factory=set)
    """Numbers of all storages so far."""
    inputs: dict[object, int] = field(default_factory=dict)
    """Storages of inputs, by number and, for attributes, by name."""
    values: list[object] = field(default_factory=list)
    """The value of each node."""

    def over(self, graph: fx.Graph) -> GraphStorages:
        """Add all nodes."""
        storages = self.storages
        for position, node in enumerate(graph.nodes):
            first = len(storages.tensors)
            storages.operands.append(self._operands(node))
            value = self._value(node)
            numbers = self._input(node, value) if is_input(node) else self._call(node, value)
            self.values.append(value)
            storages.created.append(list(range(first, len(storages.tensors))))
            storages.nodes.append(node)
            storages.position[node] = position
            storages.in_storage.append(numbers)
            storages.in_result.append(list(dict.fromkeys(numbers.values())))
        return storages

    def _input(self, node: fx.Node, value: object) -> dict[int, int]:
        """Return the storages of an input by number."""
        numbers: dict[int, int] = {}
        for index, tensor in enumerate(tensors_with_memory(value)):
            numbers_of_tensor = [storage_number(tensor)]
            if node.op == "get_attr":
                # The same attribute, under this or another name, may carry other metadata.
                numbers_of_tensor += [storage_number(real) for real in _real_part(node, index)]
            names: list[object] = [*numbers_of_tensor]
            if node.op == "get_attr":
                names.append((node.target, index))
            storage = next((self.inputs[name] for name in names if name in self.inputs), None)
            if storage is None:
                storage = self._new(tensor, node)
            elif self.storages.makers[storage][-1] is not node:
                self.storages.makers[storage].append(node)
            self.inputs.update(dict.fromkeys(names, storage))
            numbers.update(dict.fromkeys(numbers_of_tensor, storage))
        self.known.update(numbers)
        return numbers

    def _call(self, node: fx.Node, value: object) -> dict[int, int]:
        """Return the storages of the result of a call by number."""
        numbers: dict[int, int] = {}
        for result, item, tensor in _results(node, value):
            number = storage_number(tensor)
            if number in numbers:
                continue
            storage = self._operand_storage(number) if number in self.known else None
            if storage is None:
                storage = self._by_schema(node, result, item)
            numbers[number] = self._new(tensor, node) if storage is None else storage
        self.known.update(numbers)
        return numbers

    def _operands(self, node: fx.Node) -> list[int]:
        position = self.storages.position
        try:
            return [position[operand] for operand in node.all_input_nodes]
        except KeyError as error:
            raise CaptureError(
                f"node {node.name} reads {error.args[0]}, which comes after it; order the graph"
            ) from None

    def _operand_storage(self, number: int) -> int | None:
        """Return the storage of that number in an operand of the node being added."""
        for operand in self.storages.operands[-1]:
            storage = self.storages.in_storage[operand].get(number)
            if storage is not None:
                return storage
        return None

    def _by_schema(self, node: fx.Node, result: int, item: int) -> int | None:
        operand = _operand_of_result(node, result, item)
        if operand is None:
            return None
        candidates = self.storages.storages_of([operand])
        return candidates[0] if len(candidates) == 1 else None

    def _value(self, node: fx.Node) -> object:
        """Return a node's value from its metadata; for an item, from that of its container."""
        if node.op == "output":
            return None
        container = node.args[0] if node.target is operator.getitem else None
        parts = (
            self.values[self.storages.position[container]]
            if isinstance(container, fx.Node)
            else None
        )
        if isinstance(parts, list | tuple | dict):
            value = parts[node.args[1]]  # type: ignore[index]
        elif "val" in node.meta or not node.users:
            value = node.meta.get("val")
        elif node.op == "get_attr":
            value = _attribute(node)
        else:
            raise CaptureError(
                f"node {node.name} carries no meta['val'], so its size is not known; run"
                " torch.fx.passes.fake_tensor_prop.FakeTensorProp on the graph, or export the model"
            )
        return value

    def _new(self, tensor: Tensor, node: fx.Node) -> int:
        self.storages.tensors.append(tensor)
        self.storages.makers.append([node])
        return len(self.storages.tensors) - 1


def _results(node: fx.Node, value: object) -> list[tuple[int, int, Tensor]]:
    """Return (result, item, tensor) for the tensors that a call returns."""
    returns = getattr(getattr(node.target, "_schema", None), "returns", ())
    if isinstance(value, list | tuple) and len(returns) > 1:
        return [
            (result, item, tensor)
            for result, part in enumerate(value)
            for item, tensor in enumerate(tensors_with_memory(part))
        ]
    return [(0, item, tensor) for item, tensor in enumerate(tensors_with_memory(value))]


def _attribute(node: fx.Node) -> object:
    """Return the attribute fetched by a node; None if the graph has no module."""
    value: object = node.graph.owning_module
    for name in str(node.target).split("."):
        value = getattr(value, name, None)
    return value if isinstance(value, Tensor) else None


def _real_part(node: fx.Node, index: int) -> tuple[Tensor, ...]:
    """Return tensor number `index` of an attribute, if the graph has a module."""
    return tensors_with_memory(_attribute(node))[index : index + 1]
