"""What an operator of an fx graph writes into, and what its result may share memory with.

Calls of ATen overloads say so in their schema. Elsewhere names tell: torch's methods and functions
that write end in one underscore, and views are a known list. A function or module that is not
torch's may return what it was given; that it writes into it is believed only where the name or an
argument ``inplace`` says so.
"""

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._ops import HigherOrderOperator
from torch.fx import GraphModule, Node
from torch.utils._pytree import tree_leaves

from fxpart.split.attributes import fetched
from fxpart.split.memory_names import KNOWN_MODULES, QUESTIONS, VIEWS, WRITING_OPERATORS

__all__ = ["Effects", "effects_of", "is_question"]

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
