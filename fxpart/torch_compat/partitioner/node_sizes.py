"""Sizes of the nodes of an fx graph, in bytes: ``node.size_bytes``.

A node's size is read from ``meta["tensor_meta"]``, set by shape propagation, or ``meta["val"]``,
set by export, in one pass over the graph and the modules it calls.
"""

import contextlib
import io
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.fx import GraphModule, Node
from torch.fx.graph import CodeGen
from torch.fx.passes.shape_prop import ShapeProp, TensorMetadata

from fxpart.errors import CaptureError, one_line
from fxpart.torch_compat.partitioner.checks import check_graph_module

__all__ = [
    "SOURCES",
    "get_size_of_all_nodes",
    "get_size_of_node",
    "get_tensor_meta",
    "is_item_of_tuple",
    "propagate",
    "size_bytes",
    "size_of",
]


SOURCES = frozenset({"placeholder", "get_attr"})
"""Kinds of nodes that compute nothing but fetch an input or a weight."""

_META = ("tensor_meta", "val", "example_value")


# Run a graph on example inputs, so that each node has metadata of its result.


class _Quiet(ShapeProp):
    """Torch's shape propagation, without its printed traceback when a node fails."""

    current: Node | None = None

    def run_node(self, n: Node) -> Any:  # noqa: ANN401 - as in torch
        self.current = n
        printed = io.StringIO()
        with contextlib.redirect_stderr(printed):
            result = super().run_node(n)
        sys.stderr.write(printed.getvalue())
        return result


def _check_inputs(fx_module: GraphModule, args: Sequence[Any]) -> None:
    """Refuse anything but a list with the graph's number of inputs."""
    if not isinstance(args, (list, tuple)):
        kind = "a Tensor" if isinstance(args, torch.Tensor) else f"of type {type(args).__name__}"
        raise CaptureError(f"args is {kind}; give a list of example inputs, such as [x]")
    inputs = [node for node in fx_module.graph.nodes if node.op == "placeholder"]
    if type(fx_module.graph._codegen) is not CodeGen:
        return  # nested inputs are checked when flattened
    required = [node for node in inputs if not node.args and not str(node.target).startswith("*")]
    starred = any(str(node.target).startswith("*") for node in inputs)
    if len(args) < len(required) or (len(args) > len(inputs) and not starred):
        names = ", ".join(str(node.target) for node in inputs[:8])
        raise CaptureError(
            f"{len(args)} example inputs are given, the graph takes {len(inputs)}"
            f" ({names or 'none'}); give one for each"
        )


def propagate(fx_module: GraphModule, args: Sequence[Any]) -> None:
    """Run `fx_module` on `args`, setting ``meta["tensor_meta"]`` on each node.

    Raises:
        CaptureError: if the inputs are not those of the graph, or an operator fails on them.

    """
    _check_inputs(fx_module, args)
    run = _Quiet(fx_module)
    try:
        run.propagate(*args)
    except Exception as error:
        cause = error.__cause__ or error
        name = run.current.name if run.current else None
        subject = f"operator {name} fails on" if name else "the graph does not take"
        raise CaptureError(
            f"{subject} the example inputs ({one_line(cause)}); give inputs that the model can"
            " run on"
        ) from cause


# Sizes.


class size_bytes(NamedTuple):  # noqa: N801 - torch's spelling
    """Bytes of one node."""

    output_size: int
    """Bytes of the node's result, or of all items of a tuple."""
    total_size: int
    """Bytes of the output and of the weights of a called module; 0 for an item of a tuple."""


def _elements(shape: Sequence[int | torch.SymInt], node: Node) -> int:
    """Return the number of elements; symbolic dimensions take their example values."""
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
    """Return the bytes of a tensor, its metadata, or all tensors in a nested value."""
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
    weights = [*module.parameters(), *module.buffers()]
    return sum(tensor.numel() * tensor.element_size() for tensor in weights)


def _output_bytes(root: GraphModule, node: Node) -> int:
    """Return the bytes of the result of `node`; raise if it has no metadata."""
    for key in _META:
        if key in node.meta:
            return _bytes(node.meta[key], node)
    if "type" in node.meta or not node.users:
        # Shape propagation leaves only a type for a result without tensors; the other nodes are
        # asserts and guards of an exported graph.
        return 0
    if node.op == "get_attr":
        value: Any = root
        for name in str(node.target).split("."):
            value = getattr(value, name, None)
        return _weight_bytes(value) if isinstance(value, torch.nn.Module) else _bytes(value, node)
    raise CaptureError(
        f"node {node.name} has no size information;"
        " call get_size_of_all_nodes(traced, [inputs]) with example inputs first"
    )


def is_item_of_tuple(node: Node) -> bool:
    """Return whether `node` takes an item of a tuple returned by another node."""
    if node.op != "call_function" or getattr(node.target, "__name__", "") != "getitem":
        return False
    container = node.args[0] if node.args else None
    if not isinstance(container, Node):
        return False
    value = next((container.meta[key] for key in _META if key in container.meta), None)
    return isinstance(value, (tuple, list, dict)) and not isinstance(value, TensorMetadata)


def _size(root: GraphModule, node: Node, weights: dict[str, int]) -> size_bytes:
    """Return the size of `node`; `weights` caches weight bytes by module path."""
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
    """Return the bytes of a node's result, without and with the weights of a called module.

    Parameters and buffers count at their own dtype, and once per call of a module, since calls may
    be on different devices.

    Raises:
        CaptureError: if the result has no metadata.

    """
    return _size(fx_module, node, {})


def get_size_of_all_nodes(fx_module: GraphModule, args: Sequence[Any] | None = None) -> None:
    """Set ``size_bytes`` on each node except the output to its `get_size_of_node`. O(graph).

    With `args`, the graph is first run on them, to obtain metadata of each node's result. An
    exported graph already has it.

    Raises:
        ConfigError: if `fx_module` is not a graph module.
        CaptureError: if the graph does not run on `args`, or a result has no metadata.

    """
    check_graph_module(fx_module)
    if args is not None:
        propagate(fx_module, args)
    weights: dict[str, int] = {}
    for node in fx_module.graph.nodes:
        if node.op != "output":
            node.size_bytes = _size(fx_module, node, weights)


def size_of(node: Node) -> size_bytes:
    """Return the size of `node` set by `get_size_of_all_nodes`.

    Raises:
        CaptureError: if that was not called.

    """
    size: size_bytes | None = getattr(node, "size_bytes", None)
    if size is None:
        raise CaptureError(
            f"node {node.name} has no size_bytes;"
            " call get_size_of_all_nodes(traced, [inputs]) with example inputs first"
        )
    return size


def get_tensor_meta(node: Node) -> TensorMetadata:
    """Return shape, dtype and layout of the tensor returned by `node`.

    Raises:
        CaptureError: if the result has no metadata, or is not a single tensor.

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
    present = "nothing" if value is None else f"a {type(value).__name__}"
    raise CaptureError(
        f"node {node.name} has no tensor metadata, but {present};"
        " call get_size_of_all_nodes(traced, [inputs]) with example inputs first"
    )
