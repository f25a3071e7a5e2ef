"""Which storages the nodes of an fx graph make, hold and let go: `GraphStorages`.

A result lies in the memory of an operand when ``meta["val"]`` of both share a storage, or when the
operator's schema says so for certain (see `fxpart.torch_compat.memory.storages`). So graphs that
were read from a file, where each node has a storage of its own, are understood too. A storage that
a node has in common with no operand is the node's own, even if the metadata was copied from another
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

__all__ = ["NEVER", "GraphStorages", "graph_storages", "is_input", "operand_of_result"]


# Which results of an operator lie in the memory of an operand, by what its schema says.


def operand_of_result(node: fx.Node, result: int, item: int) -> fx.Node | None:
    """Return the operand that result number `result` of a node is a view of, or written into.

    Where results or operands are lists, `item` is the place there. None where the schema does not
    say so for certain: ``reshape`` or ``to`` return what they were given, or a copy.
    """
    target = node.target
    if not isinstance(target, OpOverload):
        return None
    sources = _sources(target)
    if result >= len(sources) or sources[result] is None:
        return None
    place, name = sources[result] or (0, "")
    operand = node.args[place] if place < len(node.args) else node.kwargs.get(name)
    if isinstance(operand, list | tuple):
        operand = operand[item] if item < len(operand) else None
    return operand if isinstance(operand, fx.Node) else None


@cache
def _sources(operator: OpOverload) -> tuple[tuple[int, str] | None, ...]:
    """Return for each result the place and the name of the operand that lends its memory."""
    schema = operator._schema
    operands = [
        (place, argument.name, argument.alias_info)
        for place, argument in enumerate(schema.arguments)
        if argument.alias_info is not None
    ]
    composite = operator.has_kernel_for_dispatch_key(DispatchKey.CompositeImplicitAutograd)
    view = operator.is_view and not composite and len(operands) == 1
    found: list[tuple[int, str] | None] = []
    for result in schema.returns:
        alias = result.alias_info
        source = None
        if alias is not None and alias.is_write:
            same = [o for o in operands if o[2].before_set & alias.before_set]
            source = same[0][:2] if same else None
        elif alias is not None and view:
            source = operands[0][:2]
        found.append(source)
    return tuple(found)


NEVER = -1
"""Position of the node that lets go of a storage that is never let go."""


def is_input(node: fx.Node) -> bool:
    """Return whether a node makes nothing: its tensors are there from the start."""
    return node.op in {"placeholder", "get_attr"}


@dataclass(frozen=True, eq=False, slots=True)
class GraphStorages:
    """Storages, numbered in the order in which they are made, and the nodes that hold them.

    Lists of nodes have an item for each node, in graph order.
    """

    nodes: list[fx.Node] = field(default_factory=list)
    position: dict[fx.Node, int] = field(default_factory=dict)
    """Place of each node in the lists."""
    operands: list[list[int]] = field(default_factory=list)
    """Places of the nodes that a node reads, each once."""
    made: list[list[int]] = field(default_factory=list)
    """Storages that a node is the first to have, inputs included."""
    held: list[list[int]] = field(default_factory=list)
    """Storages that the result of a node lies in, each once."""
    tensors: list[Tensor] = field(default_factory=list)
    """For each storage a tensor in it."""
    makers: list[list[fx.Node]] = field(default_factory=list)
    """For each storage the node that makes it; the inputs that share it."""
    in_storage: list[dict[int, int]] = field(default_factory=list)
    """For each node its storages by `storage_number`; of an attribute also by the real one's."""

    def sizes(self, size_of: SizeOf | None = None) -> list[int]:
        """Return the bytes of each storage."""
        number_of = size_of or hinted_bytes
        return [number_of(tensor.untyped_storage().nbytes()) for tensor in self.tensors]

    def let_go_by(self) -> list[list[int]]:
        """Return for each node the storages that nothing needs any more once it has run.

        Results of the graph, and inputs that nobody reads, are needed to the end. An operator whose
        result nobody reads lets go of it at once. O(nodes + edges + results).
        """
        last = [NEVER if is_input(node) else place for place, node in enumerate(self.nodes)]
        kept = [is_input(node) for node in self.nodes]
        for place, node in enumerate(self.nodes):
            for operand in self.operands[place]:
                last[operand] = place
                kept[operand] = node.op == "output"
        ends = [NEVER] * len(self.tensors)
        forever = [False] * len(self.tensors)
        for place, storages in enumerate(self.held):
            for storage in storages:
                ends[storage] = max(ends[storage], last[place])
                forever[storage] |= kept[place]
        released: list[list[int]] = [[] for _ in self.nodes]
        for storage, end in enumerate(ends):
            if not forever[storage]:
                released[end].append(storage)
        return released


def graph_storages(graph: fx.Graph) -> GraphStorages:
    """Return the storages of `graph`, whose nodes carry ``meta["val"]``.

    The memory of graphs that operators run within (branches, loops) is not counted.

    Raises:
        CaptureError: when a node that another reads carries no ``meta["val"]``, or comes after one
            that reads it.

    """
    return _Walk().over(graph)


@dataclass(eq=False)
class _Walk:
    """Enters nodes one by one."""

    found: GraphStorages = field(default_factory=GraphStorages)
    known: set[int] = field(default_factory=set)
    """Numbers of all storages so far."""
    inputs: dict[object, int] = field(default_factory=dict)
    """Storages of inputs, by number and, of attributes, by name."""
    values: list[object] = field(default_factory=list)
    """What each node returns."""

    def over(self, graph: fx.Graph) -> GraphStorages:
        """Enter all nodes."""
        found = self.found
        for place, node in enumerate(graph.nodes):
            first = len(found.tensors)
            found.operands.append(self._operands(node))
            value = self._value(node)
            numbers = self._input(node, value) if is_input(node) else self._call(node, value)
            self.values.append(value)
            found.made.append(list(range(first, len(found.tensors))))
            found.nodes.append(node)
            found.position[node] = place
            found.in_storage.append(numbers)
            found.held.append(list(dict.fromkeys(numbers.values())))
        return found

    def _input(self, node: fx.Node, value: object) -> dict[int, int]:
        numbers: dict[int, int] = {}
        for index, tensor in enumerate(tensors_with_memory(value)):
            of_tensor = [storage_number(tensor)]
            if node.op == "get_attr":
                # The same attribute, or another name of it, may carry other metadata.
                of_tensor += [storage_number(real) for real in _real_part(node, index)]
            names: list[object] = [*of_tensor]
            if node.op == "get_attr":
                names.append((node.target, index))
            storage = next((self.inputs[name] for name in names if name in self.inputs), None)
            if storage is None:
                storage = self._new(tensor, node)
            elif self.found.makers[storage][-1] is not node:
                self.found.makers[storage].append(node)
            self.inputs.update(dict.fromkeys(names, storage))
            numbers.update(dict.fromkeys(of_tensor, storage))
        self.known.update(numbers)
        return numbers

    def _call(self, node: fx.Node, value: object) -> dict[int, int]:
        numbers: dict[int, int] = {}
        for result, item, tensor in _results(node, value):
            number = storage_number(tensor)
            if number in numbers:
                continue
            storage = self._of_operand(number) if number in self.known else None
            if storage is None:
                storage = self._by_schema(node, result, item)
            numbers[number] = self._new(tensor, node) if storage is None else storage
        self.known.update(numbers)
        return numbers

    def _operands(self, node: fx.Node) -> list[int]:
        position = self.found.position
        try:
            return [position[operand] for operand in node.all_input_nodes]
        except KeyError as error:
            raise CaptureError(
                f"node {node.name} reads {error.args[0]}, which comes after it; order the graph"
            ) from None

    def _of_operand(self, number: int) -> int | None:
        """Return the storage of that number that the node being entered reads."""
        for operand in self.found.operands[-1]:
            storage = self.found.in_storage[operand].get(number)
            if storage is not None:
                return storage
        return None

    def _by_schema(self, node: fx.Node, result: int, item: int) -> int | None:
        operand = operand_of_result(node, result, item)
        if operand is None:
            return None
        held = self.found.held[self.found.position[operand]]
        return held[0] if len(held) == 1 else None

    def _value(self, node: fx.Node) -> object:
        """Return what a node returns, as its metadata says; of an item, as the whole's says."""
        if node.op == "output":
            return None
        whole = node.args[0] if node.target is operator.getitem else None
        parts = self.values[self.found.position[whole]] if isinstance(whole, fx.Node) else None
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
        self.found.tensors.append(tensor)
        self.found.makers.append([node])
        return len(self.found.tensors) - 1


def _results(node: fx.Node, value: object) -> list[tuple[int, int, Tensor]]:
    """Return the tensors that a call returns, with the result that each is, and its place there."""
    returns = getattr(getattr(node.target, "_schema", None), "returns", ())
    if isinstance(value, list | tuple) and len(returns) > 1:
        return [
            (result, item, tensor)
            for result, part in enumerate(value)
            for item, tensor in enumerate(tensors_with_memory(part))
        ]
    return [(0, item, tensor) for item, tensor in enumerate(tensors_with_memory(value))]


def _attribute(node: fx.Node) -> object:
    """Return the attribute that a node fetches, None where the graph has no module."""
    value: object = node.graph.owning_module
    for name in str(node.target).split("."):
        value = getattr(value, name, None)
    return value if isinstance(value, Tensor) else None


def _real_part(node: fx.Node, index: int) -> tuple[Tensor, ...]:
    """Return the tensor number `index` of an attribute, where the graph has a module."""
    return tensors_with_memory(_attribute(node))[index : index + 1]
