"""`Row`: a prediction with its measurement; `summary`: error statistics of a set of rows."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

__all__ = ["HEADS", "Row", "summary"]

HEADS = ("rows", "median %", "p90 %", "worst %", "mean %", "under by >10 %, %")
"""Headings of `summary`: sizes of relative errors, the worst with its sign, and the share of
predictions more than a tenth below their measurement."""
_UNDER = -0.1


@dataclass(frozen=True, slots=True)
class Row:
    """One published measurement and its prediction."""

    label: str
    """Identifies the measurement."""
    predicted: float
    measured: float
    unit: str
    """Unit of both numbers."""
    held_out: bool
    """Whether nothing in the prediction was fitted to the measurement."""

    def __post_init__(self) -> None:
        """Refuse numbers without a relative error."""
        if not (0 < self.measured < float("inf") and 0 <= self.predicted < float("inf")):
            raise ValueError(f"{self.label}: {self.predicted} predicted, {self.measured} measured")

    @property
    def error(self) -> float:
        """Return the relative error: -0.1 is a prediction a tenth below the measurement."""
        return self.predicted / self.measured - 1


def summary(rows: Sequence[Row]) -> list[str]:
    """Return the cells under `HEADS`; dashes if there are no rows."""
    if not rows:
        return ["0", *["-"] * (len(HEADS) - 1)]
    errors = np.array([row.error for row in rows])
    size = np.abs(errors)
    figures = [np.median(size), np.quantile(size, 0.9), errors[size.argmax()], size.mean()]
    return [f"{len(rows):,}", *[f"{100 * f:.1f}" for f in (*figures, (errors < _UNDER).mean())]]
