"""How many bytes the nodes of an fx graph take: ``node.size_bytes``.

A node's size is read from ``meta["tensor_meta"]``, which shape propagation leaves, or from
``meta["val"]``, which export leaves. One pass over the graph, and one over the modules it calls.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.fx import GraphModule, Node
from torch.fx.passes.shape_prop import TensorMetadata

from fxpart.errors import CaptureError
from fxpart.partitioner.checks import check_graph_module
from fxpart.partitioner.shapes import propagate

__all__ = [
    "SOURCES",
    "get_size_of_all_nodes",
    "get_size_of_node",
    "get_tensor_meta",
    "is_item_of_tuple",
    "size_bytes",
    "size_of",
]

SOURCES = frozenset({"placeholder", "get_attr"})
"""What a node does that computes nothing: it hands in an input or a weight."""

_META = ("tensor_meta", "val", "example_value")


class size_bytes(NamedTuple):  # noqa: N801 - torch's spelling
    """Bytes of one node."""

    output_size: int
    """Bytes of what the node returns; of a tuple, of all items."""
    total_size: int
    """The output and the weights of the module called. An item of a tuple takes nothing itself."""


def _elements(shape: Sequence[int | torch.SymInt], node: Node) -> int:
    """Return the number of elements; a symbolic dimension has the size of the example input."""
    count = 1
    for dim in shape:
        if isinstance(dim, torch.SymInt):
            if not dim.node.has_hint():
                raise CaptureError(
                    f"the size of node {node.name} depends on data ({dim});"
                    " call get_size_of_all_nodes(traced, [inputs]) with example inputs first"
                )
            count *= int(dim.node.hint)
        else:
            count *= dim
    return count


def _bytes(value: object, node: Node) -> int:
    """Return the bytes of a tensor (or its metadata) or of all tensors in a nested value."""
    total, stack = 0, [value]
    while stack:
        item = stack.pop()
        if isinstance(item, (torch.Tensor, TensorMetadata)):
            total += _elements(item.shape, node) * item.dtype.itemsize
        elif isinstance(item, (tuple, list)):
            stack.extend(item)
        elif isinstance(item, dict):
            stack.extend(item.values())
    return total


def _weight_bytes(module: torch.nn.Module) -> int:
    """Return the bytes of a module's parameters and buffers, each at its own dtype."""
    held = [*module.parameters(), *module.buffers()]
    return sum(tensor.numel() * tensor.element_size() for tensor in held)


def _attribute(root: torch.nn.Module, path: str) -> Any:  # noqa: ANN401 - whatever lies there
    """Return what lies at a dotted path of the module, or None."""
    found: Any = root
    for atom in path.split("."):
        found = getattr(found, atom, None)
    return found


def _output_bytes(root: GraphModule, node: Node) -> int:
    """Return the bytes of what `node` returns, or raise when nothing says what it is."""
    for key in _META:
        if key in node.meta:
            return _bytes(node.meta[key], node)
    if "type" in node.meta or not node.users:
        # Shape propagation leaves a type alone for what is no tensor; nobody reads the others
        # (asserts and guards of an exported graph).
        return 0
    if node.op == "get_attr":
        held = _attribute(root, str(node.target))
        return _weight_bytes(held) if isinstance(held, torch.nn.Module) else _bytes(held, node)
    raise CaptureError(
        f"node {node.name} has no size information;"
        " call get_size_of_all_nodes(traced, [inputs]) with example inputs first"
    )


def is_item_of_tuple(node: Node) -> bool:
    """Return whether `node` only takes an item out of a tuple that another node returned."""
    if node.op != "call_function" or getattr(node.target, "__name__", "") != "getitem":
        return False
    made = node.args[0] if node.args else None
    if not isinstance(made, Node):
        return False
    value = next((made.meta[key] for key in _META if key in made.meta), None)
    return isinstance(value, (tuple, list, dict)) and not isinstance(value, TensorMetadata)


def _size(root: GraphModule, node: Node, weights: dict[str, int]) -> size_bytes:
    """Return the size of `node`; `weights` holds what modules have by their path."""
    output = _output_bytes(root, node)
    if is_item_of_tuple(node):
        return size_bytes(output, 0)
    if node.op != "call_module":
        return size_bytes(output, output)
    path = str(node.target)
    if path not in weights:
        weights[path] = _weight_bytes(root.get_submodule(path))
    return size_bytes(output, output + weights[path])


def get_size_of_node(fx_module: GraphModule, node: Node) -> size_bytes:
    """Return the bytes that a node returns, and those with the weights of the module it calls.

    Parameters and buffers count at their own dtype, and for each call of a module: the calls may
    come to lie on different devices.

    Raises:
        CaptureError: when nothing says what the node returns.

    """
    return _size(fx_module, node, {})


def get_size_of_all_nodes(fx_module: GraphModule, args: Sequence[Any] | None = None) -> None:
    """Set ``size_bytes`` on each node but the output, as `get_size_of_node` says. O(graph).

    With `args`, the graph is run on them first, to learn what each node returns. An exported graph
    knows that already.

    Raises:
        ConfigError: when `fx_module` is no graph module.
        CaptureError: when the graph does not run on `args`, or nothing says what a node returns.

    """
    check_graph_module(fx_module)
    if args is not None:
        propagate(fx_module, args)
    weights: dict[str, int] = {}
    for node in fx_module.graph.nodes:
        if node.op != "output":
            node.size_bytes = _size(fx_module, node, weights)


def size_of(node: Node) -> size_bytes:
    """Return what `get_size_of_all_nodes` set on `node`.

    Raises:
        CaptureError: when it was not called.

    """
    size: size_bytes | None = getattr(node, "size_bytes", None)
    if size is None:
        raise CaptureError(
            f"node {node.name} has no size_bytes;"
            " call get_size_of_all_nodes(traced, [inputs]) with example inputs first"
        )
    return size


def get_tensor_meta(node: Node) -> TensorMetadata:
    """Return shape, dtype and layout of the tensor that `node` returns.

    Raises:
        CaptureError: when nothing says what the node returns, or it is not one tensor.

    """
    value = next((node.meta[key] for key in _META if node.meta.get(key) is not None), None)
    if isinstance(value, TensorMetadata):
        return value
    if isinstance(value, torch.Tensor):
        return TensorMetadata(
            shape=value.shape,
            dtype=value.dtype,
            requires_grad=value.requires_grad,
            stride=value.stride(),
            memory_format=torch.contiguous_format if value.is_contiguous() else None,
            is_quantized=value.is_quantized,
            qparams={},
        )
    found = "nothing" if value is None else f"a {type(value).__name__}"
    raise CaptureError(
        f"node {node.name} has no tensor metadata, but {found};"
        " call get_size_of_all_nodes(traced, [inputs]) with example inputs first"
    )
