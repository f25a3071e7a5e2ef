"""Differences between two results of one model, and the tolerated rounding."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

from fxpart.errors import ExecutionError

__all__ = ["gradient_share", "largest_magnitude", "max_difference", "refuse_more", "rounding"]

_NOISE = 16
"""Error allowed in a sum of many terms, in roundings of the largest gradient."""


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
    differs = (a != b) & ~((a != a) & (b != b))  # noqa: PLR0124 - only nan differs from itself
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


def gradient_share(computed: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> float:
    """Return the largest gradient difference, as a share of the gradient's largest element.

    A gradient of pure rounding noise, such as that of a bias that cancels out, has no meaningful
    magnitude, so magnitudes are bounded below by a few roundings of the largest gradient of all.
    The difference is infinite if only one side has a gradient.

    Args:
        computed: gradients by parameter.
        wanted: expected gradients by parameter.

    """
    if computed.keys() != wanted.keys():
        return math.inf
    dense = {name: gradient.detach().to_dense() for name, gradient in wanted.items()}
    smallest_scale = min(1.0, _NOISE * rounding(dense)) * largest_magnitude(dense)
    largest = 0.0
    for name, gradient in dense.items():
        difference = max_difference(computed[name].to_dense(), gradient)
        magnitude = max(largest_magnitude(gradient), smallest_scale)
        if difference:
            largest = max(largest, difference / magnitude if magnitude else math.inf)
    return largest


def refuse_more(what: str, difference: float, allowed: float, relative_to: str = "") -> None:
    """Raise `ExecutionError` if `what` of a split model differs by more than `allowed`."""
    if difference > allowed:
        apart = f"are {difference:.3g}{relative_to} from"
        much = f"more than the {allowed:.3g} of rounding"
        if math.isinf(difference):
            apart = "are not comparable with"
            much = "only one of them has NaN, infinity, a gradient, or this shape or dtype"
        raise ExecutionError(
            f"the split model's {what} {apart} the unsplit model's, {much}; the captured operators"
            " leave out random numbers, hooks, what earlier calls changed, and branches on whether"
            " the model is exported: take these out of the model"
        )
