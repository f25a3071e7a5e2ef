"""How many bytes the nodes of an fx graph take: ``node.size_bytes``.

A node's size is read from ``meta["tensor_meta"]``, which shape propagation leaves, or from
``meta["val"]``, which export leaves. One pass over the graph, and one over the modules it calls.
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


# Run a graph on example inputs, so that each node knows what it returns.


class _Quiet(ShapeProp):
    """Torch's shape propagation, without the traceback that it prints when a node fails."""

    at: Node | None = None

    def run_node(self, n: Node) -> Any:  # noqa: ANN401 - as in torch
        self.at = n
        said = io.StringIO()
        with contextlib.redirect_stderr(said):
            result = super().run_node(n)
        sys.stderr.write(said.getvalue())
        return result


def _check_inputs(fx_module: GraphModule, args: Sequence[Any]) -> None:
    """Refuse what is no list of inputs, and one that is too long or too short."""
    if not isinstance(args, (list, tuple)):
        kind = "a Tensor" if isinstance(args, torch.Tensor) else f"of type {type(args).__name__}"
        raise CaptureError(f"args is {kind}; give a list of example inputs, such as [x]")
    inputs = [node for node in fx_module.graph.nodes if node.op == "placeholder"]
    if type(fx_module.graph._codegen) is not CodeGen:
        return  # nested inputs are checked where they are taken apart
    asked = [node for node in inputs if not node.args and not str(node.target).startswith("*")]
    starred = any(str(node.target).startswith("*") for node in inputs)
    if len(args) < len(asked) or (len(args) > len(inputs) and not starred):
        names = ", ".join(str(node.target) for node in inputs[:8])
        raise CaptureError(
            f"{len(args)} example inputs are given, the graph takes {len(inputs)}"
            f" ({names or 'none'}); give one for each"
        )


def propagate(fx_module: GraphModule, args: Sequence[Any]) -> None:
    """Run `fx_module` on `args`, and leave ``meta["tensor_meta"]`` on each node.

    Raises:
        CaptureError: when the inputs are not those of the graph, or an operator fails on them.

    """
    _check_inputs(fx_module, args)
    run = _Quiet(fx_module)
    try:
        run.propagate(*args)
    except Exception as error:
        cause = error.__cause__ or error
        what = f"operator {run.at.name} fails on" if run.at else "the graph does not take"
        raise CaptureError(
            f"{what} the example inputs ({one_line(cause)}); give inputs that the model can run on"
        ) from cause


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
