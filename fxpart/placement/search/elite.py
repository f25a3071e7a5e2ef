"""`Elite`: the best placements that a search has met, from which it goes on."""

import numpy as np

from fxpart.core.graph import IntArray

__all__ = ["Elite"]

_MOST = 6
_SAME = 1e-12
"""Costs that differ by this share are of the same placement, but for names of devices."""


class Elite:
    """A few placements of unlike costs, the best first. Placements are copied as they come."""

    def __init__(self) -> None:
        """Begin with none."""
        self._ranked: list[tuple[float, IntArray]] = []

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self._ranked)

    def __getitem__(self, rank: int) -> IntArray:
        """Return the placement of that rank, 0 for the best."""
        return self._ranked[rank][1]

    @property
    def best_s(self) -> float:
        """Return the cost of the best in seconds, infinite without any."""
        return self._ranked[0][0] if self._ranked else np.inf

    def keep(self, cost_s: float, placement: IntArray) -> None:
        """Take a placement, unless one of its cost is known or it is worse than all of many."""
        if any(abs(cost_s - known) <= _SAME * cost_s for known, _ in self._ranked):
            return
        self._ranked.append((cost_s, placement.copy()))
        self._ranked.sort(key=lambda ranked: ranked[0])
        del self._ranked[_MOST:]
