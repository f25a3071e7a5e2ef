"""Rules of reductions: over the batch, the parts of a sum are partial, those of a mean too."""

from dataclasses import replace

from fxpart.batch_dim.call import Call
from fxpart.batch_dim.layout import Layout
from fxpart.batch_dim.placement import PARTIAL
from fxpart.batch_dim.rules.terms import SCALES

__all__ = ["REDUCTIONS", "counted", "reduction"]

NO_SUM = "over the batch, is not made of what processes have of it alone"
_SUMS = {"sum": 0, "nansum": 0, "mean": 1, "nanmean": 1}
"""Reductions that add up, and the scale of their parts."""
_COUNTS = frozenset({"count_nonzero"})
_EXTREMES = {"amax": "max", "max": "max", "any": "max", "amin": "min", "min": "min", "all": "min"}
_OTHERS = frozenset(
    {"prod", "var", "std", "var_mean", "std_mean", "argmax", "argmin", "logsumexp", "median",
     "linalg_vector_norm", "norm", "mode", "aminmax"}
)  # fmt: skip
REDUCTIONS = frozenset(_SUMS) | _COUNTS | frozenset(_EXTREMES) | _OTHERS
"""Names of the operators that `reduction` knows."""


def _dims(call: Call, rank: int) -> list[int]:
    asked = call.arguments.get("dim")
    if isinstance(asked, int):
        return [asked % max(rank, 1)]
    return [dim % rank for dim in asked] if asked else list(range(rank))


def reduction(call: Call) -> list[Layout]:
    """Return the layout of a reduction over some dimensions, or all."""
    operand = call.first()
    is_sum = call.name in _SUMS
    at = call.layout(operand) if is_sum else call.whole(operand)
    if not at.is_split:
        keeps = not at.is_partial or at.reduction == "sum"
        return [at if keeps else call.whole(operand) for _ in call.results]
    rank = len(call.sizes(operand))
    dims = _dims(call, rank)
    if at.dim in dims:
        return [_over_the_batch(call, at, index) for index in range(len(call.results))]
    keeps_dims = call.arguments.get("keepdim", False)
    dim = at.dim if keeps_dims else at.dim - sum(other < at.dim for other in dims)
    differs = SCALES if at.scale and not is_sum else ""
    return [replace(at, dim=dim, differs=at.differs or differs) for _ in call.results]


def _over_the_batch(call: Call, at: Layout, index: int) -> Layout:
    if call.name in _SUMS:
        return Layout(PARTIAL, scale=at.scale + _SUMS[call.name])
    if call.name in _COUNTS:
        return Layout(PARTIAL)
    if call.name in _EXTREMES and index == 0:
        return Layout(PARTIAL, reduction=_EXTREMES[call.name])
    return Layout(PARTIAL, differs=f"{call.name} {NO_SUM}")


def counted(call: Call) -> list[Layout]:
    """Return the layout of a histogram: counts of all elements add up."""
    at = call.whole(call.first())
    return [Layout(PARTIAL) if at.is_split else Layout()]
