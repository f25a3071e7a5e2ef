"""`Elite`: the best placements that a search has found, from which it continues."""

import numpy as np

from fxpart.core.graph import IntArray

__all__ = ["Elite"]

_MOST = 6
_SAME = 1e-12
"""Costs within this relative difference indicate the same placement up to device names."""


class Elite:
    """A few placements with distinct costs, best first. Placements are copied when added."""

    def __init__(self) -> None:
        """Start empty."""
        self._ranked: list[tuple[float, IntArray]] = []

    def __len__(self) -> int:
        """Return the number of placements."""
        return len(self._ranked)

    def __getitem__(self, rank: int) -> IntArray:
        """Return the placement of a rank, 0 for the best."""
        return self._ranked[rank][1]

    @property
    def best_s(self) -> float:
        """The cost of the best placement; infinite if there is none."""
        return self._ranked[0][0] if self._ranked else np.inf

    def keep(self, cost_s: float, placement: IntArray) -> None:
        """Add a placement, unless its cost is already present or it is worse than a full elite."""
        if any(abs(cost_s - known) <= _SAME * cost_s for known, _ in self._ranked):
            return
        self._ranked.append((cost_s, placement.copy()))
        self._ranked.sort(key=lambda ranked: ranked[0])
        del self._ranked[_MOST:]
