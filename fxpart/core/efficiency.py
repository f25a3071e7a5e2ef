"""`Efficiency`: the shares of a device's peaks that long-running operators reach, by kind."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fxpart.errors import SpecError, nearest_names

__all__ = ["COMPUTING", "LEAST_SHARE", "MEMORY", "Efficiency", "efficiency_from"]

COMPUTING = ("gemm", "attention", "convolution")
"""Kinds of operators with FLOPs: matrix products, fused attention, and convolutions."""
MEMORY = "memory"
LEAST_SHARE = 1e-6
"""Smallest share of a peak, so that times stay finite."""


@dataclass(frozen=True, slots=True)
class Efficiency:
    """Shares of a device's peaks that long-running operators reach, each in (0, 1].

    Shares of FLOP/s are by name of the rate in `DeviceSpec.flops_per_s`. What is not stated is
    unknown, and left to the roofline (`fxpart.cost.roofline.LatencyModel`).
    """

    gemm: Mapping[str, float] = field(default_factory=dict)
    """Of matrix products."""
    attention: Mapping[str, float] = field(default_factory=dict)
    """Of fused attention, which computes half of the scores under a causal mask."""
    convolution: Mapping[str, float] = field(default_factory=dict)
    memory: float | None = None
    """Share of memory bandwidth, of all operators."""

    def __post_init__(self) -> None:
        """Check that shares are in (0, 1]."""
        for name, share in self._shares().items():
            is_number = isinstance(share, int | float) and not isinstance(share, bool)
            if not (is_number and LEAST_SHARE <= share <= 1):
                raise SpecError(
                    f"efficiency.{name} must be a share of the peak, a number in"
                    f" ({LEAST_SHARE:.0e}, 1], got {share!r}"
                )

    def _shares(self) -> dict[str, float]:
        """Return all stated shares by name, such as ``gemm.bfloat16``."""
        shares = {
            f"{kind}.{dtype}": share
            for kind in COMPUTING
            for dtype, share in getattr(self, kind).items()
        }
        return shares if self.memory is None else {**shares, MEMORY: self.memory}


def efficiency_from(stated: Mapping[str, Any]) -> Efficiency:
    """Return the shares of a mapping such as ``{gemm: {bfloat16: 0.7}, memory: 0.8}``.

    Raises:
        SpecError: if a kind does not exist, or a share is not in (0, 1].

    """
    for kind, shares in stated.items():
        if kind not in (*COMPUTING, MEMORY):
            kinds = nearest_names(str(kind), (*COMPUTING, MEMORY))
            raise SpecError(f"efficiency.{kind} does not exist; {kinds}")
        if kind != MEMORY and not (isinstance(shares, Mapping) and shares):
            raise SpecError(
                f"efficiency.{kind} must have a share for each dtype, such as bfloat16: 0.7, got"
                f" {shares!r}"
            )
    return Efficiency(**{str(kind): shares for kind, shares in stated.items()})
