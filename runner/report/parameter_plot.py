"""The figure of one parameter: time by its values, over all the other parameters' values."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median, quantiles

from runner.output.svg import Drawing, text_width
from runner.report.pareto_plot import point_tip
from runner.report.plot import (
    ACCENT,
    COLOURS,
    GRID,
    INK,
    MUTED,
    PAPER,
    WARN,
    Panel,
    cross,
    cut_text,
    frame,
    legend_across,
    mark,
)
from runner.report.ranking import RankedRow, Ranking
from runner.report.rows import SweepRow
from runner.report.scale import Scale, as_number, in_order, scale_of, tick_text
from runner.report.settings import cell

__all__ = ["MOST_LINES", "ParameterGroups", "ValueGroup", "grouped", "parameter_figure"]


# What a figure of one parameter shows: its values, and the jobs of each.

MOST_LINES = 8
"""Combinations of the other parameters that are told apart; of more only their spread is drawn."""


@dataclass(frozen=True, slots=True)
class ValueGroup:
    """The jobs of one value of a parameter."""

    value: str
    finished: tuple[RankedRow, ...]
    """The best first."""
    unfit: tuple[SweepRow, ...]
    """Those that do not fit."""
    number: float | None
    """The value as a number."""


@dataclass(frozen=True, slots=True)
class ParameterGroups:
    """Jobs by the values of one parameter."""

    key: str
    groups: tuple[ValueGroup, ...]
    """In the order of the values."""
    others: tuple[str, ...]
    """The other parameters that vary among them."""
    combinations: tuple[str, ...]
    """Of the others' values, those that have a result; empty when there are too many."""

    @property
    def numeric(self) -> bool:
        """Whether all values are numbers."""
        return all(group.number is not None for group in self.groups)

    def combination(self, row: RankedRow) -> str:
        """Return the values of the other parameters."""
        return _combination(row.row, self.others)


def grouped(ranking: Ranking, model: str | None, key: str) -> ParameterGroups:
    """Return the jobs of `model`, or of all models, by their values of `key`."""
    done, others_of_it = _jobs(ranking, model)
    unfit = [row for row in others_of_it if row.status == "infeasible"]
    everyone: Sequence[SweepRow] = [*(row.row for row in done), *unfit]
    others = tuple(
        other
        for other in ranking.keys
        if other != key
        and (model is None or other not in ranking.model_keys)
        and len({cell(row, other) for row in everyone}) > 1
    )
    best: dict[str, float | None] = {}
    for found in done:  # the best first
        best.setdefault(cell(found.row, key), ranking.by.value(found.row))
    for row in unfit:
        best.setdefault(cell(row, key), None)
    groups = tuple(
        ValueGroup(
            value,
            tuple(row for row in done if cell(row.row, key) == value),
            tuple(row for row in unfit if cell(row, key) == value),
            as_number(value),
        )
        for value in in_order(best)
    )
    names = _combinations(ranking, done, others)
    return ParameterGroups(key, groups, others, names if len(names) <= MOST_LINES else ())


def _jobs(ranking: Ranking, model: str | None) -> tuple[Sequence[RankedRow], Sequence[SweepRow]]:
    """Return the jobs with a result, the best first, and those without."""
    if model is not None:
        others = [row for row in ranking.others if ranking.model_of(row) == model]
        return ranking.of_model(model), others
    # The ranking has them model by model.
    done = sorted(ranking.finished, key=lambda found: ranking.by.value(found.row) or 0.0)
    return done, ranking.others


def _combinations(
    ranking: Ranking, done: Sequence[RankedRow], others: Sequence[str]
) -> tuple[str, ...]:
    """Return the other parameters' values that have a result, in their order."""
    best: dict[str, float | None] = {}
    for row in done:
        best.setdefault(_combination(row.row, others), ranking.by.value(row.row))
    return tuple(in_order(best))


def _combination(row: SweepRow, others: Sequence[str]) -> str:
    return " · ".join(cell(row, other) for other in others)


WIDTH, HEIGHT, TOP = 640.0, 300.0, 34.0
_MOST_LABEL, _ROW, _MOST_ROWS = 190.0, 24.0, 40
_LEFT, _BELOW, _STRIP, _SIDE = 66.0, 44.0, 22.0, 158.0
_FEW = 8
"""Jobs of a value that are drawn one by one; of more their spread is."""


def parameter_figure(ranking: Ranking, model: str | None, key: str) -> str:
    """Return time by the values of `key`, of one model or of all, as SVG in the page's colours.

    Numbers have an axis, other values a line of text each. Few combinations of the other parameters
    are told apart by colour and shape; of many the spread is drawn: least to most, the middle half,
    the median. Crosses are jobs that do not fit.
    """
    groups = grouped(ranking, model, key)
    times = _times(ranking, groups)
    if not times:
        return ""
    drawing = Drawing(f"{ranking.by.label} by {key}", PAPER)
    scale = scale_of(times)
    if groups.numeric and len(groups.groups) > 1:
        height = _by_number(drawing, ranking, groups, scale)
    else:
        height = _by_name(drawing, ranking, groups, scale)
    if groups.combinations and groups.others:
        drawing.text(12, height + 14, " · ".join(groups.others), size=11, fill=MUTED)
        height = legend_across(drawing, 12, height + 32, groups.combinations, WIDTH - 24)
    return drawing.svg(WIDTH, height + 6)


def _times(ranking: Ranking, groups: ParameterGroups) -> list[float]:
    return [time for group in groups.groups for time in _group_times(ranking, group)]


def _group_times(ranking: Ranking, group: ValueGroup) -> list[float]:
    return [ranking.by.value(row.row) or 0.0 for row in group.finished]


def _by_number(drawing: Drawing, ranking: Ranking, groups: ParameterGroups, scale: Scale) -> float:
    """Draw time over numbers, lines from number to number; return the height."""
    unfit = any(group.unfit for group in groups.groups)
    top = TOP + (_STRIP if unfit else 0.0)
    across = scale_of([group.number or 0.0 for group in groups.groups])
    panel = Panel(_LEFT, top, WIDTH - _LEFT - 16, HEIGHT - top - _BELOW, across, scale)
    own = [group.number or 0.0 for group in groups.groups]
    frame(drawing, panel, groups.key, "", own if _apart(panel, own) else ())
    drawing.text(_LEFT, 14, ranking.by.label, size=11, fill=MUTED)
    if unfit:
        drawing.text(WIDTH - 16, 14, "x does not fit", size=11, fill=MUTED, anchor="end")
    for group in groups.groups:
        x, _ = panel.place(group.number or 0.0, scale.low)
        if group.unfit:
            cross(drawing, x, top - 12, f"{groups.key}={group.value}: {_unfit(group)}")
    if groups.combinations:
        _lines(drawing, panel, ranking, groups)
    elif len(_times(ranking, groups)) < 2 * len(groups.groups):
        _points(drawing, panel, ranking, groups)
    else:
        _spreads(drawing, panel, ranking, groups)
    return HEIGHT


def _points(drawing: Drawing, panel: Panel, ranking: Ranking, groups: ParameterGroups) -> None:
    """Draw jobs that hardly ever share a value, as those of a search."""
    for group in groups.groups:
        for row in group.finished:
            place = panel.place(group.number or 0.0, ranking.by.value(row.row) or 0.0)
            mark(drawing, place, 0, point_tip(ranking, row), solid=row.pareto, size=3.5)


def _spreads(drawing: Drawing, panel: Panel, ranking: Ranking, groups: ParameterGroups) -> None:
    """Draw least, quartiles, median and most of each value, and a line through the medians."""
    spread = [group for group in groups.groups if group.finished]
    points = [
        panel.place(group.number or 0.0, median(_group_times(ranking, group))) for group in spread
    ]
    drawing.path("M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points), stroke=ACCENT, width=2)
    for group, (x, _) in zip(spread, points, strict=True):
        low, q1, middle, q3, high = (
            panel.place(panel.across.low, value)[1] for value in _five(_group_times(ranking, group))
        )
        drawing.path(f"M{x:.1f} {low:.1f}V{high:.1f}", stroke=MUTED, width=1.5)
        tip = _spread_tip(ranking, groups.key, group)
        drawing.rect(x - 6, q3, 12, q1 - q3, fill=ACCENT, opacity=0.35, radius=2, tip=tip)
        drawing.rect(x - 6, middle - 1.5, 12, 3, fill=ACCENT, tip=tip)


def _apart(panel: Panel, values: list[float]) -> bool:
    """Return whether there is room to write each of `values` below the axis."""
    places = sorted(panel.width * panel.across.at(value) for value in values)
    return all(right - left > 34 for left, right in pairwise(places))


def _lines(drawing: Drawing, panel: Panel, ranking: Ranking, groups: ParameterGroups) -> None:
    """Draw a line for each combination of the other parameters."""
    rows = [(group, row) for group in groups.groups for row in group.finished]
    for index, name in enumerate(groups.combinations):
        mine = [(group, row) for group, row in rows if groups.combination(row) == name]
        places = [
            panel.place(group.number or 0.0, ranking.by.value(row.row) or 0.0)
            for group, row in mine
        ]
        commands = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in places)
        drawing.path(commands, stroke=COLOURS[index % len(COLOURS)], width=2)
        for (_, row), place in zip(mine, places, strict=True):
            mark(drawing, place, index, point_tip(ranking, row), size=4.0)


def _by_name(drawing: Drawing, ranking: Ranking, groups: ParameterGroups, scale: Scale) -> float:
    """Draw a line of text for each value, its times beside it; return the height."""
    shown = groups.groups[:_MOST_ROWS]
    left = min(max(text_width(group.value, 11) for group in shown), _MOST_LABEL) + 16
    width = WIDTH - left - _SIDE
    base = TOP + _ROW * len(shown)
    for tick in scale.ticks(5):
        x = left + width * scale.at(tick)
        drawing.path(f"M{x:.1f} {TOP:.1f}V{base:.1f}", stroke=GRID)
        drawing.text(x, base + 16, tick_text(tick), size=11, anchor="middle", fill=MUTED)
    drawing.text(left, 16, ranking.by.label, size=11, fill=MUTED)
    drawing.text(WIDTH - 4, 16, "best", size=11, fill=MUTED, anchor="end")
    if any(group.unfit for group in groups.groups):
        drawing.text(WIDTH - _SIDE + 12, 16, "do not fit", size=11, fill=MUTED)
    for index, group in enumerate(shown):
        y = TOP + _ROW * (index + 0.5)
        label = cut_text(group.value, _MOST_LABEL)
        drawing.text(left - 10, y + 4, label, size=11, fill=INK, anchor="end")
        drawing.path(f"M{left:.1f} {y:.1f}h{width:.1f}", stroke=GRID)
        _value_row(drawing, ranking, groups, group, _Row(left, width, y, scale))
    if len(groups.groups) > len(shown):
        rest = len(groups.groups) - len(shown)
        drawing.text(left, base + 34, f"and {rest} more values", size=11, fill=MUTED)
        return base + 44
    return base + 26


class _Row:
    """Where a value's line is, and what its length stands for."""

    def __init__(self, left: float, width: float, y: float, scale: Scale) -> None:
        self.y = y
        self._left, self._width, self._scale = left, width, scale

    def x(self, time: float) -> float:
        return self._left + self._width * self._scale.at(time)


def _value_row(
    drawing: Drawing, ranking: Ranking, groups: ParameterGroups, group: ValueGroup, row: _Row
) -> None:
    times = _group_times(ranking, group)
    if group.unfit:
        unfit = f"{len(group.unfit)} of {len(group.unfit) + len(times)}"
        drawing.text(WIDTH - _SIDE + 12, row.y + 4, unfit, size=11, fill=WARN)
    if not times:
        drawing.text(WIDTH - 4, row.y + 4, "-", size=11, fill=MUTED, anchor="end")
        return
    if groups.combinations or len(times) <= _FEW:
        for found, time in reversed(list(zip(group.finished, times, strict=True))):
            names = groups.combinations
            index = names.index(groups.combination(found)) if names else 0
            mark(drawing, (row.x(time), row.y), index, point_tip(ranking, found), size=4.5)
    else:
        tip = _spread_tip(ranking, groups.key, group)
        low, q1, middle, q3, high = (row.x(value) for value in _five(times))
        drawing.path(f"M{low:.1f} {row.y:.1f}H{high:.1f}", stroke=MUTED, width=1.5)
        drawing.rect(q1, row.y - 6, q3 - q1, 12, fill=ACCENT, opacity=0.35, radius=2, tip=tip)
        drawing.rect(middle - 1.5, row.y - 6, 3, 12, fill=ACCENT, tip=tip)
    best = ranking.by.text(group.finished[0].row)
    drawing.text(WIDTH - 4, row.y + 4, best, size=11, fill=INK, anchor="end")


def _five(times: list[float]) -> tuple[float, float, float, float, float]:
    """Return least, lower quartile, median, upper quartile and most."""
    if len(times) == 1:
        return (times[0],) * 5
    q1, middle, q3 = quantiles(times, n=4, method="inclusive")
    return min(times), q1, middle, q3, max(times)


def _spread_tip(ranking: Ranking, key: str, group: ValueGroup) -> str:
    times = _group_times(ranking, group)
    low, _, middle, _, high = _five(times)
    unit = ranking.by.unit
    return (
        f"{key}={group.value}: {len(times)} jobs, {low:,.3f} to {high:,.3f} {unit},"
        f" median {middle:,.3f} {unit}"
    )


def _unfit(group: ValueGroup) -> str:
    count = len(group.finished) + len(group.unfit)
    return f"{len(group.unfit)} of {count} do not fit"
