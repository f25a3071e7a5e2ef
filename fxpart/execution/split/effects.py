"""What an operator of an fx graph writes into, and what its result may share memory with.

Calls of ATen overloads say so in their schema. Elsewhere names tell: torch's methods and functions
that write end in one underscore, and views are a known list. A function or module that is not
torch's may return what it was given; that it writes into it is believed only where the name or an
argument ``inplace`` says so.
"""

import inspect
import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import HigherOrderOperator
from torch.fx import GraphModule, Node
from torch.utils._pytree import tree_leaves

from fxpart.execution.split.graph_module import fetched

__all__ = [
    "KNOWN_MODULES",
    "PYTHON_MODULES",
    "QUESTIONS",
    "VIEWS",
    "WRITING_OPERATORS",
    "Effects",
    "SharedMemory",
    "Value",
    "effects_of",
    "is_question",
    "storages",
]


# Names by which torch and Python say what a function does to memory.


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


PYTHON_MODULES = _words("_operator operator math builtins")
"""Modules of Python whose functions are told by their names."""

KNOWN_MODULES = PYTHON_MODULES | {"torch"}

WRITING_OPERATORS = _words("""
    delitem iadd iand iconcat ifloordiv ilshift imatmul imod imul ior ipow irshift isub itruediv
    ixor setitem
""")
"""Of Python's module ``operator``, in which other names end in an underscore (``and_``)."""

VIEWS = _words("""
    H T _conj _neg_view _reshape_alias _unsafe_view adjoint alias align_as align_to alpha_dropout
    as_strided as_tensor asarray atleast_1d atleast_2d atleast_3d bfloat16 bool broadcast_tensors
    broadcast_to byte cartesian_prod ccol_indices cdouble cfloat chalf channel_shuffle char chunk
    col_indices conj contiguous cpu crow_indices cuda data detach diagonal double dropout dropout1d
    dropout2d dropout3d dsplit einsum expand expand_as feature_alpha_dropout feature_dropout
    flatten float from_numpy getitem half hsplit imag indices int lift lift_fresh long mH mT
    meshgrid moveaxis movedim narrow native_channel_shuffle nested_view_from_buffer numpy permute
    pin_memory pixel_shuffle pixel_unshuffle pos positive ravel real refine_names rename
    requires_grad_ reshape reshape_as resolve_conj resolve_neg row_indices select short slice split
    split_with_sizes squeeze sum_to_size swapaxes swapdims t tensor_split to to_dense to_device
    transpose type type_as unbind unflatten unfold unsafe_chunk unsafe_split
    unsafe_split_with_sizes unsqueeze untyped_storage values view view_as view_as_complex
    view_as_real vsplit
""")
"""Functions, methods and attributes of torch whose result may share memory with what they read:
views, and those that return their operand where there is nothing to do."""

QUESTIONS = _words("""
    device dim dtype element_size getattr is_complex is_contiguous is_floating_point layout ndim
    ndimension nelement numel shape size storage_offset stride sym_numel sym_size sym_stride
""")
"""What reads the form of a tensor, and not what it holds."""


_VIEW_MODULES = (
    nn.Identity,
    nn.Flatten,
    nn.Unflatten,
    nn.PixelShuffle,
    nn.PixelUnshuffle,
    nn.ChannelShuffle,
    nn.Sequential,
    nn.ModuleList,
    nn.ModuleDict,
    nn.modules.dropout._DropoutNd,
)


@dataclass(frozen=True, slots=True)
class Effects:
    """What an operator does to the memory of its operands."""

    written: tuple[Node, ...] = ()
    """Operands that it writes into."""
    shared: tuple[Node, ...] = ()
    """Operands that its result may share memory with."""
    writes_weights: bool = False
    """Whether it writes into the weights of the module that it calls."""


def _nodes(value: object) -> tuple[Node, ...]:
    """Return the nodes in a nested argument, each once."""
    return tuple(dict.fromkeys(leaf for leaf in tree_leaves(value) if isinstance(leaf, Node)))


def _name(node: Node) -> str:
    """Return the bare name of what a node calls."""
    schema = getattr(node.target, "_schema", None)
    if schema is not None:
        return str(schema.name).rpartition("::")[2]
    return str(getattr(node.target, "__name__", node.target)).rpartition(".")[2]


def _holds_no_tensor(node: Node) -> bool:
    """Return whether it is known that `node` returns numbers or the like."""
    if "val" in node.meta:
        leaves = tree_leaves(node.meta["val"])
        return not any(isinstance(leaf, torch.Tensor) for leaf in leaves)
    return "type" in node.meta and "tensor_meta" not in node.meta


def is_question(node: Node) -> bool:
    """Return whether `node` asks only for the form of what it reads, such as its size."""
    return _name(node) in QUESTIONS and _holds_no_tensor(node)


def _first(node: Node) -> tuple[Node, ...]:
    """Return what is given first: torch's functions write into that."""
    if node.args:
        return _nodes(node.args[0])
    named = [node.kwargs[key] for key in ("input", "self", "tensor") if key in node.kwargs]
    return _nodes(named[0]) if named else _nodes(node.kwargs)


def _arguments(function: Callable[..., Any], node: Node) -> dict[str, Any]:
    """Return what a call gives each parameter by name, as far as that is known."""
    try:
        return dict(inspect.signature(function).bind(*node.args, **node.kwargs).arguments)
    except (TypeError, ValueError):  # functions written in C have no signature
        return dict(node.kwargs)


def _by_schema(node: Node, schema: Any) -> Effects:  # noqa: ANN401 - torch does not export its type
    """Return what the schema of an ATen overload says."""
    names = [argument.name for argument in schema.arguments]
    given = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    marked = [a for a in schema.arguments if a.alias_info is not None]
    written = _nodes([given.get(a.name) for a in marked if a.alias_info.is_write])
    shared = _nodes([given.get(a.name) for a in marked])
    if _name(node) in VIEWS:
        shared = _nodes([node.args, node.kwargs])
    return Effects(written, shared)


def _is_torch(function: object) -> bool:
    """Return whether a function comes with torch or Python."""
    module = str(getattr(function, "__module__", None) or "torch")
    return module.partition(".")[0] in KNOWN_MODULES


def _of_function(node: Node) -> Effects:
    """Return the effects of a function that has no schema."""
    name, function = _name(node), node.target
    assert callable(function)
    everything = _nodes([node.args, node.kwargs])
    if getattr(function, "__module__", "") == "_operator":
        if name in WRITING_OPERATORS:
            first = _first(node)
            return Effects(first, () if name in {"setitem", "delitem"} else first)
        return Effects(shared=everything if name in VIEWS else ())
    if name == "getattr":
        asked = str(node.args[1]) if len(node.args) > 1 else ""
        return Effects(shared=everything if asked in VIEWS | {"grad"} else ())
    given = _arguments(function, node)
    written = _first(node) if _ends_like_a_write(name) or given.get("inplace") is True else ()
    written += _nodes(given.get("out"))
    if name in {"embedding", "embedding_bag"} and given.get("max_norm") is not None:
        return Effects(_nodes(given.get("weight")))
    shared = everything if name in VIEWS or not _is_torch(function) else written
    return Effects(written, shared)


def _ends_like_a_write(name: str) -> bool:
    """Return whether a name of torch's says that its first operand is written into."""
    if name.startswith("__") and name.endswith("__"):
        return name.strip("_") in WRITING_OPERATORS
    return name.endswith("_") and name != "requires_grad_"


def _of_method(node: Node) -> Effects:
    """Return the effects of a method of a tensor."""
    name = str(node.target)
    written = _first(node) if _ends_like_a_write(name) else ()
    written += _nodes(node.kwargs.get("out"))
    known = hasattr(torch.Tensor, name) and name not in VIEWS
    return Effects(written, written if known else _nodes([node.args, node.kwargs]))


def _graphs_write(modules: Iterable[nn.Module]) -> bool:
    """Return whether a graph among `modules` writes into anything."""
    return any(
        effects_of(module, node).written
        for module in modules
        if isinstance(module, GraphModule)
        for node in module.graph.nodes
        if node.op.startswith("call_") and not isinstance(node.target, HigherOrderOperator)
    )


def _of_region(root: GraphModule, node: Node) -> Effects:
    """Return the effects of a call that runs graphs, such as those under ``torch.no_grad``."""
    everything = _nodes([node.args, node.kwargs])
    tensors = tuple(operand for operand in everything if operand.op != "get_attr")
    held = [fetched(root, str(x.target)) for x in everything if x.op == "get_attr"]
    parts = [part for module in held if isinstance(module, nn.Module) for part in module.modules()]
    return Effects(everything if _graphs_write(parts) else (), tensors)


def _of_module(root: GraphModule, node: Node) -> Effects:
    """Return the effects of a module that is called."""
    module, everything = root.get_submodule(str(node.target)), _nodes([node.args, node.kwargs])
    parts = list(module.modules())
    writes = any(getattr(p, "inplace", False) is True for p in parts) or _graphs_write(parts)
    written = everything if writes else ()
    foreign = any(not type(p).__module__.startswith("torch.nn.modules") for p in parts)
    shared = everything if foreign or any(isinstance(p, _VIEW_MODULES) for p in parts) else written
    return Effects(written, shared, any(getattr(p, "max_norm", None) is not None for p in parts))


def effects_of(root: GraphModule, node: Node) -> Effects:
    """Return what `node`, an operator of the graph of `root`, does to its operands."""
    if node.op == "call_module":
        return _of_module(root, node)
    if node.op == "call_method":
        return _of_method(node)
    if isinstance(node.target, HigherOrderOperator):
        return _of_region(root, node)
    schema = getattr(node.target, "_schema", None)
    found = _of_function(node) if schema is None else _by_schema(node, schema)
    if not any(_holds_no_tensor(x) for x in (*found.written, *found.shared)):
        return found
    # Numbers are not written into, and share nothing.
    return Effects(
        tuple(x for x in found.written if not _holds_no_tensor(x)),
        tuple(x for x in found.shared if not _holds_no_tensor(x)),
    )


# Which values of a graph may share memory: a union of nodes that grows along the graph.

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
