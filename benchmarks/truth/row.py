"""`Row`: one prediction beside its measurement; `summary`: what a set of them comes to."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

__all__ = ["HEADS", "Row", "summary"]

HEADS = ("rows", "median %", "p90 %", "worst %", "mean %", "under by >10 %, %")
"""What `summary` returns: sizes of relative errors, the worst with its sign, and how often a
prediction lies more than a tenth below what was measured."""
_UNDER = -0.1


@dataclass(frozen=True, slots=True)
class Row:
    """One published measurement and what is predicted for it."""

    label: str
    """Which measurement it is."""
    predicted: float
    measured: float
    unit: str
    """Of both."""
    held_out: bool
    """Whether the measurement was kept from what the prediction was fitted to."""

    def __post_init__(self) -> None:
        """Refuse what has no relative error."""
        if not (0 < self.measured < float("inf") and 0 <= self.predicted < float("inf")):
            raise ValueError(f"{self.label}: {self.predicted} predicted, {self.measured} measured")

    @property
    def error(self) -> float:
        """Return the relative error: -0.1 is a prediction a tenth below the measurement."""
        return self.predicted / self.measured - 1


def summary(rows: Sequence[Row]) -> list[str]:
    """Return the cells under `HEADS`; dashes where there are no rows."""
    if not rows:
        return ["0", *["-"] * (len(HEADS) - 1)]
    errors = np.array([row.error for row in rows])
    size = np.abs(errors)
    figures = [np.median(size), np.quantile(size, 0.9), errors[size.argmax()], size.mean()]
    return [f"{len(rows):,}", *[f"{100 * f:.1f}" for f in (*figures, (errors < _UNDER).mean())]]
