"""Differences between two results of one model, and the tolerated rounding.

Whether a difference may be rounding depends on the magnitude of what was summed. The largest
element of all is no measure of it: beside a single 1e12, any other value would be accepted. So a
difference is taken as a share of the elements around it, see `_scales`.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

from fxpart.capture.training.loss import first_real
from fxpart.errors import ExecutionError

__all__ = [
    "gradient_share",
    "largest_magnitude",
    "loss_share",
    "max_difference",
    "nan_elements",
    "refuse_more",
    "result_share",
    "rounding",
]

_NOISE = 16
"""Error allowed in a sum of many terms, in roundings of the largest gradient of the module."""
_SPREAD = 16
"""A normal distribution's lower quartile of magnitudes times this is beyond most of its samples."""
_AT_A_TIME = 2**22
"""Elements compared at a time, as the comparison takes several times their memory."""


def max_difference(result: Any, reference: Any) -> float:  # noqa: ANN401 - results of any model
    """Return the largest elementwise difference; 0.0 if all elements are equal.

    NaN equals NaN. The difference is infinite if structures, shapes or dtypes differ, or if leaves
    other than tensors are unequal.

    Args:
        result: computed values, a tree of tensors as flattened by `torch.utils._pytree`.
        reference: expected values.

    """
    (leaves, structure), (reference_leaves, reference_structure) = (
        tree_flatten(result),
        tree_flatten(reference),
    )
    if structure != reference_structure:
        return math.inf
    pairs = zip(leaves, reference_leaves, strict=True)
    return max((_leaf_difference(a, b) for a, b in pairs), default=0.0)


def _leaf_difference(a: object, b: object) -> float:
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        is_equal = a == b if type(a) is type(b) else False
        return 0.0 if is_equal else math.inf
    if a.shape != b.shape or a.dtype != b.dtype:
        return math.inf
    a = a.detach().to(b.device)
    b = b.detach()
    differs = _differs(a, b)
    if not bool(differs.any()):
        return 0.0
    wide = torch.complex128 if a.is_complex() else torch.float64
    apart = (a[differs].to(wide) - b[differs].to(wide)).abs().max().item()
    return math.inf if math.isnan(apart) else float(apart)


def largest_magnitude(result: Any) -> float:  # noqa: ANN401
    """Return the largest finite magnitude of any element, or 0.0 if none is finite."""
    largest = 0.0
    for leaf in tree_flatten(result)[0]:
        if isinstance(leaf, Tensor) and leaf.numel():
            # Also converts booleans to numbers.
            wide = torch.complex128 if leaf.is_complex() else torch.float64
            size = leaf.detach().to(wide).abs()
            largest = max(largest, float(size.nan_to_num(0.0, 0.0, 0.0).max()))
    return largest


def rounding(result: Any) -> float:  # noqa: ANN401
    """Return the relative difference that reordering sums may cause.

    Half of the digits of the coarsest dtype: 3.5e-4 in float32, 0.09 in bfloat16, 0 in integers.
    """
    leaves = [leaf for leaf in tree_flatten(result)[0] if isinstance(leaf, Tensor)]
    real = [leaf.dtype for leaf in leaves if leaf.is_floating_point() or leaf.is_complex()]
    return math.sqrt(max((torch.finfo(dtype).eps for dtype in real), default=0.0))


def nan_elements(result: Any) -> int:  # noqa: ANN401
    """Return the number of NaN in a tree of tensors."""
    leaves = [leaf for leaf in tree_flatten(result)[0] if isinstance(leaf, Tensor)]
    dense = [leaf.detach().to_dense() for leaf in leaves]
    return sum(int((leaf != leaf).sum()) for leaf in dense)  # noqa: PLR0124 - as in `_differs`


def result_share(result: Any, reference: Any) -> float:  # noqa: ANN401
    """Return the largest difference of a result, as a share of the elements around it.

    The difference is infinite where that of `max_difference` is. Integers and booleans have no
    rounding: unequal ones differ by 1.
    """
    difference = max_difference(result, reference)
    if difference == 0 or math.isinf(difference):
        return difference
    pairs = zip(tree_flatten(result)[0], tree_flatten(reference)[0], strict=True)
    return max(_leaf_share(a, b) for a, b in pairs if _leaf_difference(a, b))


def loss_share(loss: float, reference: float, results: Iterable[Any]) -> float:
    """Return the difference of two losses, as a share of the result that the loss is the mean of.

    Args:
        loss: computed value.
        reference: expected value.
        results: flat results of the model, if known.

    """
    if loss == reference or (math.isnan(loss) and math.isnan(reference)):
        return 0.0
    difference = abs(loss - reference)
    if not math.isfinite(difference):
        return math.inf
    scale = max(abs(reference), largest_magnitude(first_real(results)))
    return difference / scale if scale else 1.0


def gradient_share(computed: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> float:
    """Return the largest difference of a gradient, as a share of the elements around it.

    A gradient of pure rounding noise, such as that of a bias that cancels out, has no meaningful
    magnitude, so magnitudes are bounded below by a few roundings of the largest gradient in the
    same module. The difference is infinite if only one side has a gradient.

    Args:
        computed: gradients by parameter.
        wanted: expected gradients by parameter.

    """
    if computed.keys() != wanted.keys():
        return math.inf
    noise = min(1.0, _NOISE * rounding(list(wanted.values())))
    largest_of = _largest_by_module(wanted)
    largest = 0.0
    for name, gradient in wanted.items():
        dense, expected = computed[name].to_dense(), gradient.detach().to_dense()
        difference = max_difference(dense, expected)
        if math.isinf(difference):
            return math.inf
        if difference:
            around = next(module for module in _modules_around(name) if module in largest_of)
            floor = noise * largest_of[around]
            largest = max(largest, _leaf_share(dense, expected, floor))
    return largest


def _modules_around(name: str) -> list[str]:
    """Return the paths of the modules around a parameter, the innermost first, ``""`` last."""
    parts = name.split(".")
    return [".".join(parts[:depth]) for depth in range(len(parts) - 1, -1, -1)]


def _largest_by_module(gradients: Mapping[str, Tensor]) -> dict[str, float]:
    """Return the largest magnitude in each module of several gradients, and in the model."""
    inside: defaultdict[str, list[float]] = defaultdict(list)
    for name, gradient in gradients.items():
        magnitude = largest_magnitude(gradient.to_dense())
        for module in _modules_around(name):
            inside[module].append(magnitude)
    return {m: max(sizes) for m, sizes in inside.items() if len(sizes) > 1 or not m}


_SHORT = (torch.bfloat16, torch.float16)
"""An exponential of such numbers, as in a softmax, may differ by a good part of itself for one
rounding: their differences are shares of the largest element of the row."""


def _leaf_share(result: Tensor, reference: Tensor, floor: float = 0.0) -> float:
    """Return the largest finite difference, as a share of the elements around it, at least `floor`.

    Differences from a tensor of zeros are 1.
    """
    if not reference.is_floating_point() and not reference.is_complex():
        return 0.0 if torch.equal(result.to(reference.device), reference) else 1.0
    wide = torch.complex128 if reference.is_complex() else torch.float64
    length = reference.shape[-1] if reference.dim() else 1
    rows, computed = reference.detach().reshape(-1, length), result.detach().reshape(-1, length)
    sample = rows.reshape(-1)[:: max(1, reference.numel() // _AT_A_TIME)]
    everywhere = _lower_quartile(sample.to(wide).abs()[None])
    at_a_time = max(1, _AT_A_TIME // length)
    starts = range(0, len(rows), at_a_time)
    most = max(largest_magnitude(rows[start : start + at_a_time]) for start in starts)
    largest = 0.0
    for start in starts:
        a, b = computed[start : start + at_a_time], rows[start : start + at_a_time]
        on_device = a.to(b.device)
        differs = _differs(on_device, b)
        if bool(differs.any()):
            apart = (on_device.to(wide) - b.to(wide)).abs()[differs]
            sizes = b.to(wide).abs()
            scales = _scales(sizes, everywhere, most).clamp(min=floor)
            if reference.dtype in _SHORT:
                row_largest = sizes.masked_fill(~sizes.isfinite(), 0.0).amax(-1, keepdim=True)
                scales = torch.maximum(scales, row_largest)
            scales = scales[differs]
            shares = torch.where(scales > 0, apart / scales, 1.0)
            largest = max(largest, float(shares.max()))
    return largest


def _scales(sizes: Tensor, everywhere: Tensor, largest: float) -> Tensor:
    """Return the magnitude that errors of each element are a share of.

    An element may be small because terms cancel whose magnitude the elements around it show. That
    cannot hold for all of them: if a quarter is small, then because its terms are. So the scale of
    an element is its own magnitude, or that of the usual elements of its row or of the tensor,
    judged by their lower quartiles.

    Args:
        sizes: magnitudes of elements in rows.
        everywhere: lower quartile of the tensor's magnitudes.
        largest: largest finite magnitude in the tensor.

    """
    usual = _SPREAD * torch.maximum(_lower_quartile(sizes), everywhere)
    return torch.maximum(sizes, usual.clamp(max=largest))


def _lower_quartile(sizes: Tensor) -> Tensor:
    """Return the lower quartile of each row's finite elements above 0; 0 if there are none."""
    counts = (sizes > 0) & sizes.isfinite()
    ordered = sizes.masked_fill(~counts, math.inf).sort(dim=-1).values
    place = (counts.sum(dim=-1, keepdim=True) - 1).clamp(min=0) // 4
    return ordered.gather(-1, place).nan_to_num(posinf=0.0)


def _differs(a: Tensor, b: Tensor) -> Tensor:
    return (a != b) & ~((a != a) & (b != b))  # noqa: PLR0124 - only nan differs from itself


def refuse_more(what: str, share: float, allowed: float) -> None:
    """Raise `ExecutionError` if `what` of a split model differs by a share above `allowed`."""
    if share > allowed:
        apart = (
            f"differ from the unsplit model's by {share:.3g} of the elements around them, more than"
            f" the {allowed:.3g} of rounding"
        )
        if math.isinf(share):
            apart = (
                "are not comparable with the unsplit model's, only one of them has NaN, infinity, a"
                " gradient, or this shape or dtype"
            )
        raise ExecutionError(
            f"the split model's {what} {apart}; the captured operators leave out random numbers,"
            " hooks, what earlier calls changed, and branches on whether the model is exported:"
            " take these out of the model"
        )
