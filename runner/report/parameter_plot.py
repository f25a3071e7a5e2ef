"""The figure of one parameter: time by its values, over all values of the other parameters."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median, quantiles

from runner.output.plot import (
    TEXT,
    Panel,
    Scale,
    axis_across,
    cross,
    cut_text,
    frame,
    legend_across,
    mark,
    scale_of,
)
from runner.output.svg import IN_PAGE, Drawing, colour_of, text_width
from runner.report.pareto_plot import point_tip
from runner.report.ranking import RankedRow, Ranking
from runner.report.sweep_data import PLAN, SweepRow, as_number, cell, in_order

__all__ = ["parameter_figure"]

_MOST_LINES = 8
"""Most combinations of the other parameters drawn as lines; of more, only the spread is drawn."""
_FEW = 8
"""Most jobs per value that are drawn one by one; of more, only the spread is drawn."""
_WIDTH, _HEIGHT, _TOP = 640.0, 300.0, 34.0
_MOST_LABEL, _ROW, _MOST_ROWS = 190.0, 24.0, 40
_LEFT, _BELOW, _STRIP, _SIDE = 66.0, 44.0, 22.0, 158.0


@dataclass(frozen=True, slots=True)
class _Group:
    """The jobs of one value of a parameter."""

    value: str
    finished: tuple[RankedRow, ...]
    """Jobs with a result, best first."""
    times: tuple[float, ...]
    """The times of `finished`."""
    unfit: tuple[SweepRow, ...]
    """Jobs that do not fit."""

    @property
    def number(self) -> float:
        """The value as a number; 0 for text."""
        return as_number(self.value) or 0.0

    @property
    def unfit_text(self) -> str:
        """The share of jobs that do not fit, such as ``2 of 8``."""
        return f"{len(self.unfit)} of {len(self.unfit) + len(self.finished)}"


@dataclass(frozen=True, slots=True)
class _Groups:
    """Jobs by the values of one parameter."""

    key: str
    groups: tuple[_Group, ...]
    """The groups, in the order of values."""
    others: tuple[str, ...]
    """The other parameters that vary."""
    combinations: tuple[str, ...]
    """Combinations of the others' values with a result; empty if there are too many."""

    @property
    def numeric(self) -> bool:
        """Whether all values are numbers."""
        return all(as_number(group.value) is not None for group in self.groups)

    def combination(self, row: RankedRow) -> str:
        """Return the values of the other parameters as text."""
        return _combination(row.row, self.others)


def _grouped(ranking: Ranking, model: str | None, key: str) -> _Groups:
    """Return the jobs of `model`, or of all models, grouped by value of `key`."""
    finished_rows, without_result = _jobs(ranking, model)
    unfit = [row for row in without_result if row.status == "infeasible"]
    rows = [*(row.row for row in finished_rows), *unfit]
    others = tuple(
        other
        for other in ranking.keys
        if other not in (key, PLAN)
        and (model is None or other not in ranking.model_keys)
        and len({cell(row, other) for row in rows}) > 1
    )
    best: dict[str, float | None] = {}
    for ranked_row in finished_rows:  # best first
        best.setdefault(cell(ranked_row.row, key), ranking.by.value(ranked_row.row))
    for row in unfit:
        best.setdefault(cell(row, key), None)
    groups = []
    for value in in_order(best):
        of_value = tuple(row for row in finished_rows if cell(row.row, key) == value)
        times = tuple(ranking.by.value(row.row) or 0.0 for row in of_value)
        without = tuple(row for row in unfit if cell(row, key) == value)
        groups.append(_Group(value, of_value, times, without))
    names = _combinations(ranking, finished_rows, others)
    return _Groups(key, tuple(groups), others, names if len(names) <= _MOST_LINES else ())


def _jobs(ranking: Ranking, model: str | None) -> tuple[Sequence[RankedRow], Sequence[SweepRow]]:
    """Return the jobs with a result, best first, and those without."""
    if model is not None:
        others = [row for row in ranking.others if ranking.model_of(row) == model]
        return ranking.of_model(model), others
    # The ranking is sorted by model.
    finished_rows = sorted(ranking.finished, key=lambda row: ranking.by.value(row.row) or 0.0)
    return finished_rows, ranking.others


def _combinations(
    ranking: Ranking, finished_rows: Sequence[RankedRow], others: Sequence[str]
) -> tuple[str, ...]:
    """Return the combinations of the other parameters with a result, in order."""
    best: dict[str, float | None] = {}
    for row in finished_rows:
        best.setdefault(_combination(row.row, others), ranking.by.value(row.row))
    return tuple(in_order(best))


def _combination(row: SweepRow, others: Sequence[str]) -> str:
    return " · ".join(cell(row, other) for other in others)


def parameter_figure(ranking: Ranking, model: str | None, key: str) -> str:
    """Return time by value of `key`, for one model or all, as SVG in the page's colours.

    Numbers have an axis; other values have a line of text each. A few combinations of the other
    parameters differ in colour and shape. Of many, the spread is drawn: range, quartiles and
    median. Crosses are jobs that do not fit.
    """
    groups = _grouped(ranking, model, key)
    times = [time for group in groups.groups for time in group.times]
    if not times:
        return ""
    drawing = Drawing(f"{ranking.by.label} by {key}", IN_PAGE)
    scale = scale_of(times)
    if groups.numeric and len(groups.groups) > 1:
        height = _by_number(drawing, ranking, groups, scale)
    else:
        height = _by_name(drawing, ranking, groups, scale)
    if groups.combinations and groups.others:
        drawing.text(12, height + 14, " · ".join(groups.others), size=TEXT, fill=IN_PAGE.muted)
        height = legend_across(drawing, 12, height + 32, groups.combinations, _WIDTH - 24)
    return drawing.svg(_WIDTH, height + 6)


def _by_number(drawing: Drawing, ranking: Ranking, groups: _Groups, scale: Scale) -> float:
    """Draw time over a numeric parameter; return the height."""
    unfit = any(group.unfit for group in groups.groups)
    top = _TOP + (_STRIP if unfit else 0.0)
    values = [group.number for group in groups.groups]
    across = scale_of(values)
    panel = Panel(_LEFT, top, _WIDTH - _LEFT - 16, _HEIGHT - top - _BELOW, across, scale)
    frame(drawing, panel, groups.key, "", values if _apart(panel, values) else ())
    drawing.text(_LEFT, 14, ranking.by.label, size=TEXT, fill=IN_PAGE.muted)
    if unfit:
        drawing.text(_WIDTH - 16, 14, "x does not fit", size=TEXT, fill=IN_PAGE.muted, anchor="end")
    for group in groups.groups:
        if group.unfit:
            tip = f"{groups.key}={group.value}: {group.unfit_text} do not fit"
            cross(drawing, panel.x_of(group.number), top - 12, tip)
    if groups.combinations:
        _lines(drawing, panel, ranking, groups)
    elif sum(len(group.times) for group in groups.groups) < 2 * len(groups.groups):
        _points(drawing, panel, ranking, groups)
    else:
        _spreads(drawing, panel, ranking, groups)
    return _HEIGHT


def _points(drawing: Drawing, panel: Panel, ranking: Ranking, groups: _Groups) -> None:
    """Draw single jobs, for values that are rarely shared, such as those of a search."""
    for group in groups.groups:
        for row, time in zip(group.finished, group.times, strict=True):
            point = panel.place(group.number, time)
            mark(drawing, point, 0, point_tip(ranking, row), solid=row.pareto, size=3.5)


def _spreads(drawing: Drawing, panel: Panel, ranking: Ranking, groups: _Groups) -> None:
    """Draw range, quartiles and median of each value, and a line through the medians."""
    spread = [group for group in groups.groups if group.finished]
    points = [panel.place(group.number, median(group.times)) for group in spread]
    drawing.line(points, stroke=IN_PAGE.accent)
    for group, (x, _) in zip(spread, points, strict=True):
        low, q1, middle, q3, high = map(panel.y_of, _five(group.times))
        drawing.path(f"M{x:.1f} {low:.1f}V{high:.1f}", stroke=IN_PAGE.muted, width=1.5)
        tip = _spread_tip(ranking, groups.key, group)
        drawing.rect(x - 6, q3, 12, q1 - q3, fill=IN_PAGE.accent, opacity=0.35, radius=2, tip=tip)
        drawing.rect(x - 6, middle - 1.5, 12, 3, fill=IN_PAGE.accent, tip=tip)


def _apart(panel: Panel, values: list[float]) -> bool:
    """Return whether there is room to write each of `values` below the axis."""
    places = sorted(map(panel.x_of, values))
    return all(right - left > 34 for left, right in pairwise(places))


def _lines(drawing: Drawing, panel: Panel, ranking: Ranking, groups: _Groups) -> None:
    """Draw a line for each combination of the other parameters."""
    points_of: dict[str, list[tuple[tuple[float, float], RankedRow]]] = defaultdict(list)
    for group in groups.groups:
        for row, time in zip(group.finished, group.times, strict=True):
            points_of[groups.combination(row)].append((panel.place(group.number, time), row))
    for index, name in enumerate(groups.combinations):
        points = points_of[name]
        drawing.line([point for point, _ in points], stroke=colour_of(index, IN_PAGE))
        for point, row in points:
            mark(drawing, point, index, point_tip(ranking, row), size=4.0)


def _by_name(drawing: Drawing, ranking: Ranking, groups: _Groups, scale: Scale) -> float:
    """Draw a row for each value of a parameter that is not numeric; return the height."""
    shown = groups.groups[:_MOST_ROWS]
    left = min(max(text_width(group.value, 11) for group in shown), _MOST_LABEL) + 16
    height = _ROW * len(shown)
    panel = Panel(left, _TOP, _WIDTH - left - _SIDE, height, scale, Scale(0.0, 1.0))
    axis_across(drawing, panel, 5)
    drawing.text(left, 16, ranking.by.label, size=TEXT, fill=IN_PAGE.muted)
    drawing.text(_WIDTH - 4, 16, "best", size=TEXT, fill=IN_PAGE.muted, anchor="end")
    if any(group.unfit for group in groups.groups):
        drawing.text(_WIDTH - _SIDE + 12, 16, "do not fit", size=TEXT, fill=IN_PAGE.muted)
    for index, group in enumerate(shown):
        y = _TOP + _ROW * (index + 0.5)
        label = cut_text(group.value, _MOST_LABEL)
        drawing.text(left - 10, y + 4, label, size=TEXT, anchor="end")
        drawing.path(f"M{left:.1f} {y:.1f}h{panel.width:.1f}", stroke=IN_PAGE.grid)
        _value_row(drawing, ranking, groups, group, x_of=panel.x_of, y=y)
    if len(groups.groups) > len(shown):
        rest = len(groups.groups) - len(shown)
        note = f"and {rest} more values"
        drawing.text(left, panel.base + 34, note, size=TEXT, fill=IN_PAGE.muted)
        return panel.base + 44
    return panel.base + 26


def _value_row(
    drawing: Drawing,
    ranking: Ranking,
    groups: _Groups,
    group: _Group,
    *,
    x_of: Callable[[float], float],
    y: float,
) -> None:
    """Draw the times of one value at the height `y`."""
    times = group.times
    if group.unfit:
        label = group.unfit_text
        drawing.text(_WIDTH - _SIDE + 12, y + 4, label, size=TEXT, fill=IN_PAGE.warn)
    if not times:
        drawing.text(_WIDTH - 4, y + 4, "-", size=TEXT, fill=IN_PAGE.muted, anchor="end")
        return
    if groups.combinations or len(times) <= _FEW:
        names = groups.combinations
        for row, time in reversed(list(zip(group.finished, times, strict=True))):
            index = names.index(groups.combination(row)) if names else 0
            mark(drawing, (x_of(time), y), index, point_tip(ranking, row), size=4.5)
    else:
        tip = _spread_tip(ranking, groups.key, group)
        low, q1, middle, q3, high = map(x_of, _five(times))
        drawing.path(f"M{low:.1f} {y:.1f}H{high:.1f}", stroke=IN_PAGE.muted, width=1.5)
        drawing.rect(q1, y - 6, q3 - q1, 12, fill=IN_PAGE.accent, opacity=0.35, radius=2, tip=tip)
        drawing.rect(middle - 1.5, y - 6, 3, 12, fill=IN_PAGE.accent, tip=tip)
    best = ranking.by.text(group.finished[0].row)
    drawing.text(_WIDTH - 4, y + 4, best, size=TEXT, anchor="end")


def _five(times: Sequence[float]) -> tuple[float, float, float, float, float]:
    """Return minimum, lower quartile, median, upper quartile and maximum."""
    if len(times) == 1:
        return (times[0],) * 5
    q1, middle, q3 = quantiles(times, n=4, method="inclusive")
    return min(times), q1, middle, q3, max(times)


def _spread_tip(ranking: Ranking, key: str, group: _Group) -> str:
    times = group.times
    low, _, middle, _, high = _five(times)
    unit = ranking.by.unit
    return (
        f"{key}={group.value}: {len(times)} jobs, {low:,.3f} to {high:,.3f} {unit},"
        f" median {middle:,.3f} {unit}"
    )
