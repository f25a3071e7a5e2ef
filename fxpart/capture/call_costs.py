"""Cost of one call: floating-point operations, temporaries, and bytes read and written."""

import logging
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from fxpart.capture.live_bytes import LiveBytes, storage_sizes

__all__ = ["CallCounter", "CallCounts", "dense_bytes", "moved_bytes"]


_log = logging.getLogger(__name__)

Call = Callable[..., Any]


def _grouped_mm_flops(arguments: list[Any]) -> int:
    """Return 2 T K N for T rows, each multiplied by one of the (E, K, N) weights."""
    rows, weights = arguments[0], arguments[1]
    columns = weights.shape[-1] if rows.shape[-1] == weights.shape[-2] else weights.shape[-2]
    return 2 * int(rows.numel()) * int(columns)


def _grouped_mm_backward_flops(arguments: list[Any]) -> int:
    """Return 4 T K N: a product for the gradient of the rows, and one for that of the weights."""
    return 2 * _grouped_mm_flops(arguments)


def _attention_flops(arguments: list[Any]) -> int:
    """Return 2 B H Sq Sk (D + Dv): scores, and their product with the values.

    Masked products count as well, as in torch's counts for other devices.
    """
    query, key, value = arguments[:3]
    rows = int(query.shape[:-1].numel()) * int(key.shape[-2])
    return 2 * rows * int(query.shape[-1] + value.shape[-1])


def _windowed_attention_flops(arguments: list[Any]) -> int:
    """Return 2 B H P (D + Dv) for P pairs of a query and a key: those of a window, if there is one.

    Its last argument is the window, 0 for none; then masked products count as well.
    """
    query, key, value, *_, window = arguments
    if not window:
        return _attention_flops([query, key, value])
    queries = int(query.shape[-2])
    seen_by_last = min(queries, int(window))
    pairs = seen_by_last * queries - seen_by_last * (seen_by_last - 1) // 2
    return 2 * int(query.shape[:-2].numel()) * pairs * int(query.shape[-1] + value.shape[-1])


def _attention_backward_flops(arguments: list[Any]) -> int:
    """Return 2 B H Sq Sk (3 D + 2 Dv): scores again, their gradients and those of all operands."""
    _, query, key, value = arguments[:4]
    rows = int(query.shape[:-1].numel()) * int(key.shape[-2])
    return 2 * rows * int(3 * query.shape[-1] + 2 * value.shape[-1])


def _convolution_backward_flops(arguments: list[Any]) -> int:
    """Return the FLOPs of the forward for each gradient of the input or the weight.

    Torch's counter has too many for groups: each filter of the weight's gradient reads the
    channels of one group.
    """
    gradient, inputs, weight = arguments[:3]
    is_transposed = next(argument for argument in arguments if isinstance(argument, bool))
    outer = inputs if is_transposed else gradient  # each element has a whole filter's products
    products = int(outer.numel()) * (int(weight.numel()) // int(weight.shape[0]))
    of_input, of_weight, _ = arguments[-3:]  # the mask of the results
    return 2 * products * (int(of_input) + int(of_weight))


# Operators that torch's counter neither knows nor decomposes, and counts as 0, or counts wrongly.
_FORMULAS: dict[str, Callable[[list[Any]], int]] = {
    "aten.convolution_backward.default": _convolution_backward_flops,
    "aten._grouped_mm.default": _grouped_mm_flops,
    "aten._scaled_dot_product_flash_attention_for_cpu.default": _attention_flops,
    "aten._scaled_dot_product_flash_attention_for_cpu_backward.default": _attention_backward_flops,
    "fxpart.context_attention.default": _attention_flops,
    "fxpart.context_attention_backward.default": _attention_backward_flops,
    "fxpart.fused_attention.default": _windowed_attention_flops,
    "transformers.grouped_mm_fallback.default": _grouped_mm_flops,
    "transformers.grouped_mm_fallback_backward.default": _grouped_mm_backward_flops,
}

# Operators that leave their result as memory happens to be.
_ALLOCATIONS = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")

# Operators that read only some rows of their first operand.
_GATHERS = ("embedding", "index", "index_select", "gather", "take")

# Products of rows, each with the weight of its expert: (rows, weights of all experts, ...).
_EXPERTS = ("_grouped_mm", "grouped_mm_fallback")

# Operators that write the rows in their last operand into their first. Not index_put_, which
# broadcasts that operand over rows known only from its indices.
_SCATTERS = ("index_copy_",)


# Floating-point operations and temporaries.


@cache
def _has_counts(target: Call) -> bool:
    """Return whether calls of `target` may count anything: by a formula, or by their parts.

    Most operators, such as views, have neither, and need not be run to be counted.
    """
    if str(target) in _FORMULAS or not isinstance(target, torch._ops.OpOverload):
        return True
    if torch.Tag.pointwise in target.tags:
        return False
    name: str = target.name()  # type: ignore[no-untyped-call]
    parts = torch._C.DispatchKey.CompositeImplicitAutograd
    return (
        target._overloadpacket in flop_registry
        or parts in target.py_kernels
        or torch._C._dispatch_has_kernel_for_dispatch_key(name, parts)
    )


# Composite operators that accelerators run as one kernel; in evaluation, that of batch
# normalization returns no statistics.
_FUSED = ("batch_norm", "rms_norm")
_ATTENTION, _UNFUSED_ATTENTION = (
    "scaled_dot_product_attention",
    "_scaled_dot_product_attention_math",
)


def _attention_bytes(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Return what fused attention allocates beside its result.

    This is the logarithm of each query's sum, and a mask of numbers for a boolean one.
    """
    query, mask = args[0], args[3] if len(args) > 3 else kwargs.get("attn_mask")
    sums = 4 * int(query.shape[:-1].numel())
    if not isinstance(mask, torch.Tensor) or mask.dtype != torch.bool:
        return sums
    return sums + int(mask.numel()) * int(query.element_size())


def _fuses_attention(tensors: Sequence[torch.Tensor], *, enable_gqa: bool) -> bool:
    """Return whether a fused kernel takes attention of query, key, value and perhaps a mask.

    All fused kernels of torch 2.13 need a dimension of heads, as many heads in each or shared ones
    by `enable_gqa`, and adjacent elements in each row (``sdp_utils_cpp.h``: `check_tensor_shapes`,
    `check_batch_size_and_num_heads_dense`, `check_last_dim_stride_equals_1_dense`). Else attention
    is computed by its definition, with all scores in memory. A CPU's kernels take any mask, which
    is not told apart.
    """
    operands = tensors[:3]
    if any(tensor.dim() != 4 for tensor in operands):
        return False
    heads = {tuple(tensor.shape[: 1 if enable_gqa else 2]) for tensor in operands}
    return len(heads) == 1 and all(tensor.stride(-1) == 1 for tensor in tensors)


def _bare_name(target: object) -> str:
    return str(target).removeprefix("aten.").partition(".")[0]


class _Traffic(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Context manager that adds up the bytes that the parts of a call read and write."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.moved_bytes = 0

    def __torch_dispatch__(
        self,
        func: Any,  # noqa: ANN401 - as torch calls it
        types: Any,  # noqa: ANN401
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        result = func(*args, **(kwargs or {}))
        operands = [a for a in tree_leaves((args, kwargs)) if isinstance(a, torch.Tensor)]
        known = storage_sizes(operands)
        results = [r for r in tree_leaves(result) if isinstance(r, torch.Tensor)]
        fresh = [r for r in results if not storage_sizes([r]).keys() <= known.keys()]
        written = operands[:1] if func._schema.is_mutable else []
        self.moved_bytes += moved_bytes(_bare_name(func), operands, fresh, written)
        return result


def _signature(arguments: list[Any]) -> Hashable:
    return tuple(
        (tuple(a.shape), a.stride(), a.dtype) if isinstance(a, torch.Tensor) else repr(a)
        for a in arguments
    )


@dataclass(frozen=True, slots=True)
class CallCounts:
    """What a call computes and allocates."""

    flops: int = 0
    temporary_bytes: int = 0
    """Peak of what it allocates and frees again, beside its results."""
    moved_bytes: int | None = None
    """Bytes that its parts read and write; None for those of its operands and results."""


class CallCounter:
    """Counts calls by running them on meta tensors, once for each distinct signature.

    A composite operator counts as its parts, so attention counts 4 B H Sq Sk D. Elementwise
    operators count 0 FLOPs, as their time is bound by memory traffic. What a kernel allocates
    itself is not counted.
    """

    def __init__(self) -> None:
        self._seen: dict[Hashable, CallCounts] = {}

    def count(self, target: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CallCounts:
        """Return the counts of ``target(*args, **kwargs)``; only layouts of tensors are read."""
        if not _has_counts(target):
            return CallCounts()
        name = str(target)
        flat, spec = tree_flatten((args, kwargs))
        key = (name, _signature(flat))
        if key not in self._seen:
            formula = _FORMULAS.get(name)
            self._seen[key] = CallCounts(formula(flat)) if formula else _run(target, flat, spec)
        return self._seen[key]


def _run(target: Call, flat: list[Any], spec: TreeSpec) -> CallCounts:
    meta = [
        torch.empty_strided(a.shape, a.stride(), dtype=a.dtype, device="meta")
        if isinstance(a, torch.Tensor)
        else torch.device("meta")
        if isinstance(a, torch.device)
        else a
        for a in flat
    ]
    args, kwargs = tree_unflatten(meta, spec)
    tensors = [a for a in meta if isinstance(a, torch.Tensor)]
    bare = _bare_name(target)
    is_attention, is_fused = bare in (_ATTENTION, _UNFUSED_ATTENTION), bare in _FUSED
    if bare == _ATTENTION:
        is_fused = _fuses_attention(tensors, enable_gqa=bool(kwargs.get("enable_gqa")))
    operands = storage_sizes(tensors)
    live, traffic = LiveBytes([operands]), _Traffic()
    parts: AbstractContextManager[Any] = traffic if is_attention and not is_fused else nullcontext()
    try:
        with torch.no_grad(), live, parts, FlopCounterMode(display=False) as counter:
            result = target(*args, **kwargs)
    except (RuntimeError, TypeError, ValueError) as error:
        # Operators without a meta kernel, or that need values (sort, histc, nonzero), do no
        # matrix work: their cost is their memory traffic.
        _log.debug("%s is not counted: %s", target, error)
        return CallCounts()
    flops = int(counter.get_total_flops())
    if is_fused:
        return CallCounts(flops, _attention_bytes(args, kwargs) if is_attention else 0)
    results = (leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor))
    kept = operands | storage_sizes(results)
    temporary_bytes = live.peak_bytes[0] - sum(kept.values())
    return CallCounts(flops, temporary_bytes, traffic.moved_bytes if is_attention else None)


# Bytes.


def dense_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes of the tensor's elements, densely packed as in a transfer."""
    return int(tensor.numel()) * tensor.element_size()


def _touched_bytes(tensor: torch.Tensor) -> int:
    """Return the distinct bytes touched by reading the tensor; broadcasts touch fewer."""
    if tensor.layout is not torch.strided:
        return dense_bytes(tensor)
    elements = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        elements *= int(size) if stride != 0 else min(int(size), 1)
    return elements * tensor.element_size()


def moved_bytes(
    operator: str,
    inputs: Iterable[torch.Tensor],
    results: Iterable[torch.Tensor],
    mutated: Iterable[torch.Tensor],
    *,
    every_expert: bool = False,
) -> int:
    """Return bytes read plus bytes written by `operator` (its bare name, such as ``embedding``).

    `results` are outputs with their own storage, `mutated` inputs that are written to; a call with
    neither is a view, or checks metadata, and moves nothing, as one that only allocates. A gather,
    whose first input is the table, reads its indices and the returned rows; a bag of embeddings
    reads one row per index and returns sums of rows. At most as many experts as rows are read,
    unless `every_expert` is set, since the minimum of two numbers is not a polynomial in sizes.
    """
    inputs, results, mutated = list(inputs), list(results), list(mutated)
    if operator in _ALLOCATIONS or not (results or mutated):
        return 0
    written = sum(dense_bytes(t) for t in results) + sum(_touched_bytes(t) for t in mutated)
    if operator == "copy_":  # overwritten data is not read
        return sum(_touched_bytes(t) for t in inputs[1:]) + written
    if operator in _SCATTERS and len(inputs) > 1:
        return sum(_touched_bytes(t) for t in inputs[1:]) + _touched_bytes(inputs[-1])
    if operator in _GATHERS:
        return sum(_touched_bytes(t) for t in inputs[1:]) + 2 * written
    if operator == "embedding_bag":
        table, indices = inputs[0], inputs[1]
        row_bytes = int(table.shape[-1]) * table.element_size()
        rows = int(indices.numel()) * row_bytes
        return sum(_touched_bytes(t) for t in inputs[1:]) + rows + written
    read = sum(_touched_bytes(t) for t in inputs)
    if operator in _EXPERTS and inputs[1].dim() == 3 and not every_expert:
        # At most as many experts are read as rows are routed to them.
        experts, rows = int(inputs[1].shape[0]), int(inputs[0].shape[0])
        read -= max(0, experts - rows) * (_touched_bytes(inputs[1]) // max(1, experts))
    return read + written
