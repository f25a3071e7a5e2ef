"""The heat map of two parameters: the best time for each pair of values."""

from typing import NamedTuple

from runner.output.plot import TEXT, cut_text, scale_of
from runner.output.svg import IN_PAGE, Drawing, text_width
from runner.report.ranking import Ranking
from runner.report.sweep_data import PLAN, cell, in_order

__all__ = ["heat_map_keys", "heat_map_svg"]

_MOST = 24
"""Most values of a parameter that fit a heat map."""
_HIGH, _TOP, _MOST_LABEL, _WIDEST = 30.0, 56.0, 170.0, 640.0
_ROOMY = 50.0
"""Width in pixels above which a cell fits its full number."""


def heat_map_keys(ranking: Ranking) -> tuple[str, str] | None:
    """Return the two parameters to show, vertical and horizontal; None if there are fewer.

    They are mode and devices if both vary, and the first two that vary otherwise.
    """
    values = {key: len({cell(row, key) for row in ranking.data.rows}) for key in ranking.keys}
    candidates = [key for key in ranking.keys if key not in (PLAN, *ranking.model_keys)]
    shown = [key for key in candidates if 2 <= values[key] <= _MOST]
    if {"mode", "devices"} <= set(shown):
        return "mode", "devices"
    return (shown[0], shown[1]) if len(shown) > 1 else None


def heat_map_svg(ranking: Ranking, model: str, keys: tuple[str, str]) -> str:
    """Return a map of the best time for each pair of values; better times have stronger colours.

    A cell says if none of the pair's jobs fits, and is empty for a pair without jobs.
    """
    best = _best(ranking, model, keys)
    rows, columns = (_values(best, axis) for axis in (0, 1))
    labels = [f"{keys[0]} ↓", *rows]
    left = min(max(text_width(word, 11) for word in labels), _MOST_LABEL) + 14
    wide = min(max((_WIDEST - left) / len(columns), 26.0), 130.0)
    drawing = Drawing(f"{ranking.by.label}: {keys[0]} by {keys[1]}", IN_PAGE)
    _name_axes(drawing, keys, left)
    _name_values(drawing, (rows, columns), left, wide)
    times = [time for time in best.values() if time is not None]
    scale = scale_of(times) if times else None
    for (value, other), time in best.items():
        x, y = left + wide * columns.index(other), _TOP + _HIGH * rows.index(value)
        pair = f"{keys[0]}={value} {keys[1]}={other}"
        if time is None or scale is None:
            warn = IN_PAGE.warn
            box = _Box(x, y, wide, _no_fit(wide), f"{pair}: does not fit", warn, warn, 0.1)
        else:
            tip = f"{pair}: {time:,.3f} {ranking.by.unit}"
            shade = round(0.06 + 0.5 * (1 - scale.at(time)), 3)
            number = _number(time, wide)
            box = _Box(x, y, wide, number, tip, IN_PAGE.accent, IN_PAGE.ink, shade)
        _draw(drawing, box, leads=time is not None and time == min(times))
    return drawing.svg(left + wide * len(columns) + 2, _TOP + _HIGH * len(rows) + 4)


def _name_axes(drawing: Drawing, keys: tuple[str, str], left: float) -> None:
    drawing.text(left, 16, f"{keys[1]} →", size=TEXT, fill=IN_PAGE.muted)
    drawing.text(left - 8, 16, f"{keys[0]} ↓", size=TEXT, fill=IN_PAGE.muted, anchor="end")


def _name_values(
    drawing: Drawing, values: tuple[list[str], list[str]], left: float, wide: float
) -> None:
    rows, columns = values
    for j, value in enumerate(columns):
        if wide > _ROOMY:
            middle = left + wide * (j + 0.5)
            text = cut_text(value, wide - 2)
            drawing.text(middle, 44, text, size=TEXT, anchor="middle")
        else:  # alternating between two lines
            text = cut_text(value, 2 * wide - 4, 9)
            drawing.text(left + wide * j, 38 + 12 * (j % 2), text, size=9)
    for i, value in enumerate(rows):
        text = cut_text(value, _MOST_LABEL)
        drawing.text(left - 8, _TOP + _HIGH * i + 19, text, size=TEXT, anchor="end")


class _Box(NamedTuple):
    """A cell of the map."""

    x: float
    y: float
    wide: float
    words: str
    tip: str
    fill: str
    ink: str
    shade: float


def _draw(drawing: Drawing, box: _Box, *, leads: bool) -> None:
    drawing.rect(
        box.x + 1,
        box.y + 1,
        box.wide - 2,
        _HIGH - 2,
        fill=box.fill,
        opacity=box.shade,
        stroke=IN_PAGE.ink if leads else "none",
        radius=3,
        tip=box.tip,
    )
    middle, size = box.x + box.wide / 2, TEXT if box.wide > _ROOMY else 9
    drawing.text(
        middle, box.y + 19, box.words, size=size, fill=box.ink, anchor="middle", bold=leads
    )


def _best(
    ranking: Ranking, model: str, keys: tuple[str, str]
) -> dict[tuple[str, str], float | None]:
    """Return the best time of each pair with jobs; None if none of them fits."""
    best: dict[tuple[str, str], float | None] = {}
    for row in ranking.others:
        if ranking.model_of(row) == model and row.status == "infeasible":
            best[cell(row, keys[0]), cell(row, keys[1])] = None
    for ranked_row in ranking.of_model(model):
        pair = cell(ranked_row.row, keys[0]), cell(ranked_row.row, keys[1])
        time, incumbent = ranking.by.value(ranked_row.row), best.get(pair)
        if time is not None and (incumbent is None or time < incumbent):
            best[pair] = time
    return best


def _values(best: dict[tuple[str, str], float | None], axis: int) -> list[str]:
    """Return the ordered values of one of the two parameters."""
    best_of: dict[str, float | None] = {}
    for pair, time in best.items():
        times = [t for t in (best_of.get(pair[axis]), time) if t is not None]
        best_of[pair[axis]] = min(times, default=None)
    return in_order(best_of)


def _number(time: float, wide: float) -> str:
    """Return `time` with four digits, or three if there is little room."""
    whole = len(str(int(time)))
    return f"{time:,.{max((4 if wide > _ROOMY else 3) - whole, 0)}f}"


def _no_fit(wide: float) -> str:
    return "does not fit" if wide > 84 else "no fit" if wide > _ROOMY else "x"
