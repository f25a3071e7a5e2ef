"""`with_fused_layout`: give results of attention captured on meta the layout of fused kernels.

Fused attention returns its result laid out as its query, in torch's kernels for the CPU as in flash
attention and cuDNN for CUDA. Models view queries as (batch, tokens, heads, width) and transpose
them, so transposed back the result is contiguous, and `contiguous` or `reshape` copies nothing. On
meta, torch computes attention by its definition, whose result is laid out by heads: `contiguous`
would be a copy that no device makes.
"""

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.export import ExportedProgram
from torch.utils._pytree import tree_leaves, tree_map

from fxpart.capture.calls import REGIONS, storage_key

__all__ = ["with_fused_layout"]

_ATTENTION = torch.ops.aten.scaled_dot_product_attention.default
_META = "meta"
_CPU = torch.device("cpu")


def with_fused_layout(program: ExportedProgram) -> ExportedProgram:
    """Return `program` with the values of its nodes changed where attention has another layout.

    The calls are the same. Attention inside regions keeps the layout that it was captured with.
    """
    changed: set[fx.Node] = set()
    for node in program.graph.nodes:
        if node.op != "call_function" or node.target in REGIONS:
            continue
        if node.target is _ATTENTION:
            result = _attention(node)
        elif not changed.isdisjoint(node.all_input_nodes):
            result = _called(node)
        else:
            continue
        if not _are_alike(node, result):
            node.meta["val"] = result
            changed.add(node)
    return program


def _attention(node: fx.Node) -> object:
    """Return the fake result of an attention call on meta, as laid out by the CPU's kernels."""
    value = node.meta["val"]
    if not isinstance(value, FakeTensor) or value.device.type != _META:
        return value
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda i: i.meta["val"])
    with value.fake_mode, torch.no_grad():
        args, kwargs = tree_map(_on_cpu, (args, kwargs))
        strides = _ATTENTION(*args, **kwargs).stride()
        return torch.empty_strided(value.shape, strides, dtype=value.dtype, device=_META)


def _on_cpu(leaf: object) -> object:
    if not isinstance(leaf, Tensor):
        return leaf
    return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device=_CPU)


def _called(node: fx.Node) -> object:
    """Return the fake result of a call on the values that its operands have now."""
    assert callable(node.target), "only calls are computed"
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda i: i.meta["val"])
    fakes = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, FakeTensor)]
    with fakes[0].fake_mode, torch.no_grad():
        return node.target(*args, **kwargs)


def _are_alike(node: fx.Node, result: object) -> bool:
    """Return whether `result`, computed again, may be left out for the present value of a call.

    Both have the same strides, and neither is a view of an operand.
    """
    before, after = (
        [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
        for value in (node.meta.get("val"), result)
    )
    operands = tree_leaves([operand.meta.get("val") for operand in node.all_input_nodes])
    known = {storage_key(leaf) for leaf in operands if isinstance(leaf, Tensor)}
    return not any(storage_key(leaf) in known for leaf in after) and all(
        was.stride() == now.stride() for was, now in zip(before, after, strict=True)
    )
