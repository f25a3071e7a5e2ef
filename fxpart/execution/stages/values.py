"""Prepare a flat graph so that only single tensors pass from one stage to the next.

A number or shape used by another stage is recomputed there from its tensor. A tuple is passed item
by item.
"""

import operator
from typing import Any

from torch import Tensor, fx, nn

from fxpart.errors import SpecError
from fxpart.execution.split.effects import PYTHON_MODULES, QUESTIONS
from fxpart.execution.stages.flat_graph import FlatGraph

__all__ = ["find_scalars", "move_items_to_their_tuple", "unpack_tuples"]

_ABOUT_TENSORS = QUESTIONS | {"get_device", "item", "tolist"}
"""Tensor methods that return no tensor."""
_ATTRIBUTES = frozenset(("shape", "dtype", "device", "ndim", "layout", "is_cuda", "requires_grad"))
# fmt: off
_TUPLE_MAKERS = frozenset((
    "chunk", "split", "tensor_split", "split_with_sizes", "unbind", "hsplit", "vsplit", "dsplit",
    "topk", "sort", "aminmax", "meshgrid", "broadcast_tensors", "frexp", "mode",
))
# fmt: on
_MISSING = object()


def _value(node: fx.Node) -> Any:  # noqa: ANN401 - what a node makes is anything
    """Return the example value stored on `node` by capture, or `_MISSING`."""
    return node.meta.get("val", node.meta.get("example_value", _MISSING))


def _constant_item(node: fx.Node) -> bool:
    """Return whether `node` takes an item of a value by a constant index or key."""
    return (
        node.op == "call_function"
        and node.target is operator.getitem
        and isinstance(node.args[0], fx.Node)
        and isinstance(node.args[1], (int, str))
    )


def find_scalars(graph: fx.Graph) -> set[fx.Node]:
    """Return the nodes whose value is not a tensor: numbers, shapes, dtypes.

    Decided by the example value stored by capture or, without one, by the called function.
    """
    scalars: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op in {"placeholder", "get_attr", "output", "call_module"}:
            continue
        example = _value(node)
        if example is _MISSING:
            scalar = _calls_for_a_scalar(node, scalars)
        else:
            parts = example if isinstance(example, (tuple, list)) else [example]
            scalar = example is not None and not any(isinstance(p, Tensor) for p in parts)
        if scalar:
            scalars.add(node)
    return scalars


def _calls_for_a_scalar(node: fx.Node, scalars: set[fx.Node]) -> bool:
    reads_scalars = bool(node.all_input_nodes) and all(n in scalars for n in node.all_input_nodes)
    if node.op == "call_method":
        return reads_scalars or node.target in _ABOUT_TENSORS
    if node.target is getattr:
        return reads_scalars or node.args[1] in _ATTRIBUTES
    if node.target is len:
        return True
    return reads_scalars and getattr(node.target, "__module__", "") in PYTHON_MODULES


def move_items_to_their_tuple(graph: fx.Graph, stage_of: dict[fx.Node, int]) -> None:
    """Move the items of a tuple into the stage that produces it, so that no tuple is passed.

    Changes `stage_of`. Items of a known tensor stay, as do all items of a value that a later stage
    also uses as a whole.
    """
    for node in graph.nodes:
        if node not in stage_of or isinstance(_value(node), Tensor):
            continue
        later = [user for user in node.users if stage_of.get(user, -1) > stage_of[node]]
        if all(_constant_item(user) and user.args[0] is node for user in later):
            for user in later:
                stage_of[user] = stage_of[node]


def unpack_tuples(flat: FlatGraph) -> None:
    """Replace tuples that a later stage uses as a whole by their items. Changes `flat`.

    Raises:
        SpecError: if the number of items is unknown.

    """
    for node in list(flat.graph.nodes):
        home = flat.stage_of.get(node)
        if home is None or node.op == "output":
            continue
        later = [user for user in node.users if flat.stage_of.get(user, home) > home]
        example = _value(node)
        is_tuple = isinstance(example, (tuple, list))
        if later and is_tuple and any(isinstance(part, Tensor) for part in example):
            _unpack(flat, node, later, example)
        elif later and example is _MISSING and _makes_tuple(node, flat):
            raise SpecError(
                f"{node.name} is a tuple that {later[0].name} of a later stage uses as a whole; a "
                "stage passes on tensors only: take its items in the stage that makes it"
            )


def _makes_tuple(node: fx.Node, flat: FlatGraph) -> bool:
    if node.op == "call_module":
        called = flat.attributes.get(str(node.target))
        return isinstance(called, (nn.RNNBase, nn.MultiheadAttention))
    name = getattr(node.target, "__name__", node.target)
    return node.op != "placeholder" and name in _TUPLE_MAKERS


def _unpack(
    flat: FlatGraph, node: fx.Node, users: list[fx.Node], example: tuple[Any, ...] | list[Any]
) -> None:
    items = []
    with flat.graph.inserting_before(node.next):
        for index, part in enumerate(example):
            item = flat.graph.call_function(operator.getitem, (node, index))
            item.meta["val"] = part
            flat.stage_of[item] = flat.stage_of[node]
            items.append(item)
    container: Any = items if isinstance(example, list) else tuple(items)
    for user in users:
        user.args = fx.map_arg(user.args, lambda n: container if n is node else n)
        user.kwargs = fx.map_arg(user.kwargs, lambda n: container if n is node else n)
