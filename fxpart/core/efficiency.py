"""`Efficiency`: the shares of a device's peaks that long-running operators reach, by kind."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from fxpart.errors import SpecError, nearest_names

__all__ = ["KINDS", "LEAST_SHARE", "MEMORY", "OTHER", "Efficiency", "efficiency_from"]

MEMORY = "memory"
"""The rate whose share is that of memory bandwidth; other names are dtypes."""
OTHER = "other"
"""The kind of operators without FLOPs."""
LEAST_SHARE = 1e-6
"""Smallest share of a peak, so that times stay finite."""


@dataclass(frozen=True, slots=True)
class Efficiency:
    """Shares of a device's peaks that long-running operators reach, each in (0, 1].

    They are by kind of operator, and by the name of the rate: a dtype of `DeviceSpec.flops_per_s`,
    or ``memory``. What is not stated is unknown, and left to the roofline
    (`fxpart.cost.roofline.LatencyModel`).
    """

    gemm: Mapping[str, float] = field(default_factory=dict)
    """Of matrix products."""
    attention: Mapping[str, float] = field(default_factory=dict)
    """Of fused attention, which computes half of the scores under a causal mask."""
    convolution: Mapping[str, float] = field(default_factory=dict)
    other: Mapping[str, float] = field(default_factory=dict)
    """Of all others, which only move data: a share of ``memory`` alone."""

    def __post_init__(self) -> None:
        """Check that shares are in (0, 1], and that ``other`` has one of memory alone."""
        for kind in KINDS:
            for rate, share in getattr(self, kind).items():
                if kind == OTHER and rate != MEMORY:
                    raise SpecError(
                        f"efficiency.{OTHER} is of operators without FLOPs, which have a share of"
                        f" {MEMORY} alone, got {rate}"
                    )
                is_number = isinstance(share, int | float) and not isinstance(share, bool)
                if not (is_number and LEAST_SHARE <= share <= 1):
                    raise SpecError(
                        f"efficiency.{kind}.{rate} must be a share of the peak, a number in"
                        f" ({LEAST_SHARE:.0e}, 1], got {share!r}"
                    )


KINDS = tuple(kind.name for kind in fields(Efficiency))
"""The kinds of operators that have shares of their own."""


def efficiency_from(stated: Mapping[str, Any]) -> Efficiency:
    """Return the shares of a mapping such as ``{gemm: {bfloat16: 0.7, memory: 0.8}}``.

    Raises:
        SpecError: if a kind does not exist, or a share is not in (0, 1].

    """
    for kind, shares in stated.items():
        if kind not in KINDS:
            names = nearest_names(str(kind), KINDS)
            raise SpecError(f"efficiency.{kind} does not exist; {names}")
        if not (isinstance(shares, Mapping) and shares):
            raise SpecError(
                f"efficiency.{kind} must have a share for each dtype, or for {MEMORY}, such as"
                f" {{bfloat16: 0.7}}, got {shares!r}"
            )
    return Efficiency(**{str(kind): shares for kind, shares in stated.items()})
