"""Determine which operands an fx operator writes into, and which its result may alias.

ATen overloads declare this in their schema. Other functions and methods of torch are recognized by
name: writes end in one underscore, and views are listed here. The result of any other function or
module may alias all operands; it counts as a write only if its name or an ``inplace`` argument says
so.
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


# Memory effects of torch's and Python's functions, by name.


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


PYTHON_MODULES = _words("_operator operator math builtins")
"""Python modules whose functions are recognized by name."""

KNOWN_MODULES = PYTHON_MODULES | {"torch"}

WRITING_OPERATORS = _words("""
    delitem iadd iand iconcat ifloordiv ilshift imatmul imod imul ior ipow irshift isub itruediv
    ixor setitem
""")
"""Functions of Python's ``operator`` that write; there, a trailing underscore means nothing."""

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
"""Functions, methods and attributes of torch whose result may alias their operands: views, and
functions that return an operand unchanged if there is nothing to do."""

_LIKE_OTHERS = _words("align_as expand_as reshape_as type_as view_as")
"""Those among them that read only the metadata of operands other than the first."""

_CONVERSIONS = _words("to type_as")
"""Overloads among them whose result of another dtype is a copy."""

QUESTIONS = _words("""
    device dim dtype element_size getattr is_complex is_contiguous is_floating_point layout ndim
    ndimension nelement numel shape size storage_offset stride sym_numel sym_size sym_stride
""")
"""Functions that read a tensor's metadata, not its elements."""

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
    """Effects of an operator on the memory of its operands."""

    written: tuple[Node, ...] = ()
    """Operands it writes into."""
    shared: tuple[Node, ...] = ()
    """Operands its result may share memory with."""
    writes_weights: bool = False
    """Whether it writes into the weights of the called module."""


def effects_of(root: GraphModule, node: Node) -> Effects:
    """Return the effects of `node`, an operator of the graph of `root`, on its operands."""
    if node.op == "call_module":
        return _module_effects(root, node)
    if node.op == "call_method":
        return _method_effects(node)
    if isinstance(node.target, HigherOrderOperator):
        return _region_effects(root, node)
    schema = getattr(node.target, "_schema", None)
    effects = _function_effects(node) if schema is None else _schema_effects(node, schema)
    if not any(_holds_no_tensor(x) for x in (*effects.written, *effects.shared)):
        return effects
    # Numbers cannot be written into and share no memory.
    return Effects(
        tuple(x for x in effects.written if not _holds_no_tensor(x)),
        tuple(x for x in effects.shared if not _holds_no_tensor(x)),
    )


def is_question(node: Node) -> bool:
    """Return whether `node` reads only a tensor's metadata, such as its size."""
    return _name(node) in QUESTIONS and _holds_no_tensor(node)


def _nodes(value: object) -> tuple[Node, ...]:
    """Return the nodes in a nested argument, each once."""
    return tuple(dict.fromkeys(leaf for leaf in tree_leaves(value) if isinstance(leaf, Node)))


def _name(node: Node) -> str:
    """Return the unqualified name of the called function, method or module."""
    schema = getattr(node.target, "_schema", None)
    if schema is not None:
        return str(schema.name).rpartition("::")[2]
    return str(getattr(node.target, "__name__", node.target)).rpartition(".")[2]


def _holds_no_tensor(node: Node) -> bool:
    """Return whether the metadata of `node` shows that it returns no tensor."""
    if "val" in node.meta:
        leaves = tree_leaves(node.meta["val"])
        return not any(isinstance(leaf, torch.Tensor) for leaf in leaves)
    return "type" in node.meta and "tensor_meta" not in node.meta


def _first_operand(node: Node) -> tuple[Node, ...]:
    """Return the nodes of the first argument, the one torch's in-place functions write into."""
    if node.args:
        return _nodes(node.args[0])
    named = [node.kwargs[key] for key in ("input", "self", "tensor") if key in node.kwargs]
    return _nodes(named[0]) if named else _nodes(node.kwargs)


def _arguments(function: Callable[..., Any], node: Node) -> dict[str, Any]:
    """Return the arguments of a call by parameter name, as far as the names are known."""
    try:
        return dict(inspect.signature(function).bind(*node.args, **node.kwargs).arguments)
    except (TypeError, ValueError):  # C functions have no signature
        return dict(node.kwargs)


def _schema_effects(node: Node, schema: Any) -> Effects:  # noqa: ANN401 - torch does not export its type
    """Return the effects declared by the schema of an ATen overload."""
    names = [argument.name for argument in schema.arguments]
    values = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    aliased = [a for a in schema.arguments if a.alias_info is not None]
    written = _nodes([values.get(a.name) for a in aliased if a.alias_info.is_write])
    shared = _nodes([values.get(a.name) for a in aliased])
    if _name(node) in VIEWS:
        # Of another tensor only the shape or the dtype is read.
        views = _nodes([value for name, value in values.items() if name != "other"])
        shared = tuple(x for x in views if not _is_copy(node, x))
    return Effects(written, shared)


def _is_copy(node: Node, operand: Node) -> bool:
    """Return whether metadata shows that the result of an overload is a copy of an operand."""
    made, source = node.meta.get("val"), operand.meta.get("val")
    if not (isinstance(made, Tensor) and isinstance(source, Tensor)):
        return False
    if _name(node) == "contiguous":
        return made.stride() != source.stride()
    return _name(node) in _CONVERSIONS and made.dtype != source.dtype


def _aliased_operands(node: Node, name: str) -> tuple[Node, ...]:
    """Return the operands that the result of `name`, which may be a view, may alias."""
    if name in _LIKE_OTHERS:
        return _first_operand(node)
    return _nodes([node.args, node.kwargs])


def _is_torch(function: object) -> bool:
    """Return whether a function belongs to torch or Python."""
    module = str(getattr(function, "__module__", None) or "torch")
    return module.partition(".")[0] in KNOWN_MODULES


def _function_effects(node: Node) -> Effects:
    """Return the effects of a function without a schema."""
    name, function = _name(node), node.target
    assert callable(function)
    arguments = _nodes([node.args, node.kwargs])
    if getattr(function, "__module__", "") == "_operator":
        if name in WRITING_OPERATORS:
            first = _first_operand(node)
            return Effects(first, () if name in {"setitem", "delitem"} else first)
        return Effects(shared=arguments if name in VIEWS else ())
    if name == "getattr":
        attribute = str(node.args[1]) if len(node.args) > 1 else ""
        return Effects(shared=arguments if attribute in VIEWS | {"grad"} else ())
    values = _arguments(function, node)
    writes = _ends_like_a_write(name) or values.get("inplace") is True
    written = _first_operand(node) if writes else ()
    written += _nodes(values.get("out"))
    if name in {"embedding", "embedding_bag"} and values.get("max_norm") is not None:
        return Effects(_nodes(values.get("weight")))
    if not _is_torch(function):
        return Effects(written, arguments)
    return Effects(written, _aliased_operands(node, name) if name in VIEWS else written)


def _ends_like_a_write(name: str) -> bool:
    """Return whether a torch function of that name writes into its first operand."""
    if name.startswith("__") and name.endswith("__"):
        return name.strip("_") in WRITING_OPERATORS
    return name.endswith("_") and name != "requires_grad_"


def _method_effects(node: Node) -> Effects:
    """Return the effects of a method of a tensor."""
    name = str(node.target)
    written = _first_operand(node) if _ends_like_a_write(name) else ()
    written += _nodes(node.kwargs.get("out"))
    returns_new_tensor = hasattr(torch.Tensor, name) and name not in VIEWS
    return Effects(written, written if returns_new_tensor else _aliased_operands(node, name))


def _graphs_write(modules: Iterable[nn.Module]) -> bool:
    """Return whether any graph among `modules` writes in place."""
    return any(
        effects_of(module, node).written
        for module in modules
        if isinstance(module, GraphModule)
        for node in module.graph.nodes
        if node.op.startswith("call_") and not isinstance(node.target, HigherOrderOperator)
    )


def _region_effects(root: GraphModule, node: Node) -> Effects:
    """Return the effects of a call that runs graphs, such as those under ``torch.no_grad``."""
    arguments = _nodes([node.args, node.kwargs])
    tensors = tuple(operand for operand in arguments if operand.op != "get_attr")
    attributes = [fetched(root, str(x.target)) for x in arguments if x.op == "get_attr"]
    parts = [part for a in attributes if isinstance(a, nn.Module) for part in a.modules()]
    return Effects(arguments if _graphs_write(parts) else (), tensors)


def _module_effects(root: GraphModule, node: Node) -> Effects:
    """Return the effects of calling a module."""
    module, arguments = root.get_submodule(str(node.target)), _nodes([node.args, node.kwargs])
    parts = list(module.modules())
    writes = any(getattr(p, "inplace", False) is True for p in parts) or _graphs_write(parts)
    written = arguments if writes else ()
    foreign = any(not type(p).__module__.startswith("torch.nn.modules") for p in parts)
    shared = arguments if foreign or any(isinstance(p, _VIEW_MODULES) for p in parts) else written
    return Effects(written, shared, any(getattr(p, "max_norm", None) is not None for p in parts))


# Values of a graph that may share memory.

Value = Node | tuple[str, int]
"""A node, or a storage: a label of its origin, and its address."""


def storages(label: str, value: object) -> list[Value]:
    """Return the storages of the tensors in a nested value; a sparse tensor stands for itself."""
    addresses: list[Value] = []
    for leaf in tree_leaves(value):
        if isinstance(leaf, Tensor):
            strided = leaf.layout is torch.strided
            addresses.append((label, int(leaf.untyped_storage()._cdata) if strided else id(leaf)))
    return addresses


class SharedMemory:
    """Groups of values that may share memory, built by entering operators in graph order."""

    def __init__(self) -> None:
        # Imported only if a graph writes in place, which is rare, since it takes half a second.
        from networkx.utils import UnionFind

        self._groups = UnionFind()
        self._items: dict[Node, dict[object, Node]] = {}
        """First node of each item, by index, for results with separate items."""

    def root(self, value: Value) -> Value:
        """Return the representative of the group of `value`."""
        root: Value = self._groups[value]
        return root

    def join(self, a: Value, b: Value) -> None:
        """Join the groups of two values."""
        self._groups.union(a, b)

    def hold(self, node: Node, label: str, value: object) -> None:
        """Join `node` with all values of the same storages under the same label."""
        if node not in self._items:
            for storage in storages(label, value):
                self.join(storage, node)

    def enter(self, node: Node, shared: Sequence[Node]) -> None:
        """Join `node` with the operands its result may share memory with.

        The items of a new result of several tensors, such as that of ``topk``, have separate
        memory: a write into one does not change the others, so they are not joined through the
        tuple.
        """
        if not shared and _has_separate_items(node):
            self._items[node] = {}
        for operand in shared:
            if operand in self._items:
                self.join(self._items[operand].setdefault(node.args[1], node), node)
            else:
                self.join(operand, node)


def _has_separate_items(node: Node) -> bool:
    """Return whether a new result is only used item by item, and no two items share memory.

    This includes a tensor used by rows, which do not overlap. Storages are compared if capture left
    the value of the result.
    """
    for user in node.users:
        if user.target is not operator.getitem or user.args[0] is not node:
            return False
        index = user.args[1]
        if type(index) is not int or index < 0:
            return False
    addresses = storages("", node.meta.get("val"))
    return bool(node.users) and len(set(addresses)) == len(addresses)
