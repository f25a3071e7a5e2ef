"""Draw the sets: predicted over measured, from the 10th to the 90th percentile of rows."""

from collections.abc import Mapping, Sequence

import numpy as np

from benchmarks.truth.row import Row
from runner.output.svg import LIGHT, Drawing

__all__ = ["picture"]

_LABELS, _WIDTH, _ROW, _TOP = 310.0, 460.0, 26.0, 20.0
_LEAST, _MOST = 0.5, 2.0
"""Ratios at the left and the right edge; those beyond are drawn on the edge."""
_TICKS = (0.5, 0.75, 0.9, 1.0, 1.1, 1.33, 2.0)


def picture(sets: Mapping[str, Sequence[Row]]) -> str:
    """Return an SVG file with a bar for each set, and a mark at its median."""
    drawing = Drawing("Predicted over measured")
    bottom = _TOP + _ROW * len(sets)
    for tick in _TICKS:
        stroke = LIGHT.muted if tick == 1 else LIGHT.grid
        drawing.line([(_place(tick), _TOP), (_place(tick), bottom)], stroke)
        drawing.text(_place(tick) - 10, bottom + 16, f"{tick:g}", fill=LIGHT.muted)
    for index, (name, rows) in enumerate(sets.items()):
        y = _TOP + index * _ROW
        ratios = np.array([1 + row.error for row in rows])
        low, median, high = np.quantile(ratios, (0.1, 0.5, 0.9)).tolist()
        drawing.text(0, y + 17, f"{name} ({len(rows):,})", fill=LIGHT.ink)
        left = _place(low)
        drawing.rect(left, y + 6, max(1.0, _place(high) - left), _ROW - 12, fill=LIGHT.series[0])
        drawing.rect(_place(median) - 1.5, y + 3, 3, _ROW - 6, fill=LIGHT.ink)
    return drawing.svg(_LABELS + _WIDTH + 30, bottom + 30)


def _place(ratio: float) -> float:
    """Return the horizontal position of a ratio, on a logarithmic scale."""
    clipped = min(max(ratio, _LEAST), _MOST)
    share = np.log(clipped / _LEAST) / np.log(_MOST / _LEAST)
    return _LABELS + _WIDTH * float(share)
