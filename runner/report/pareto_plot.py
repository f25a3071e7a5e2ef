"""The Pareto plot: time against peak memory, or another objective, by number of devices used."""

from collections.abc import Sequence

from runner.output.plot import TEXT, Panel, cut_text, frame, legend, mark, scale_of
from runner.output.svg import IN_PAGE, Drawing, text_width
from runner.output.terminal import counted
from runner.report.ranking import RankedRow, Ranking, frontier, number
from runner.report.sweep_data import cell

__all__ = ["pareto_figure", "point_tip"]

WIDTH, HEIGHT, LEFT, TOP = 640.0, 400.0, 66.0, 34.0
_LEGEND, _BELOW = 118.0, 48.0
_CLASSES = 6
"""Distinct marks for numbers of devices; larger numbers share the last."""


def pareto_figure(ranking: Ranking, model: str) -> str:
    """Return the plot of one model as SVG in the page's colours.

    Pareto-optimal jobs are solid, others hollow. The line is the frontier of only the two axes;
    jobs that are optimal for using fewer devices may be off it.
    """
    rows = [
        row
        for row in ranking.of_model(model)
        if ranking.against.value(row.row) is not None and ranking.by.value(row.row) is not None
    ]
    if not rows:
        return ""
    places = [
        (ranking.against.value(row.row) or 0.0, ranking.by.value(row.row) or 0.0) for row in rows
    ]
    is_memory = ranking.against is ranking.memory
    name = "peak memory" if is_memory else ranking.against.name
    drawing = Drawing(f"{ranking.by.label} against {name}", IN_PAGE)
    panel = Panel(
        LEFT,
        TOP,
        WIDTH - LEFT - _LEGEND,
        HEIGHT - TOP - _BELOW,
        scale_of([x for x, _ in places]),
        scale_of([y for _, y in places], below=0.12),
    )
    below = f"{name} of the fullest device" if is_memory else name
    frame(drawing, panel, f"{below}, {ranking.against.unit}", ranking.by.label)
    _frontier_line(drawing, panel, places)
    _draw_points(drawing, panel, ranking, list(zip(rows, places, strict=True)))
    _label_best(drawing, panel, ranking, rows[0], places[0])
    return drawing.svg(WIDTH, HEIGHT)


def _draw_points(
    drawing: Drawing,
    panel: Panel,
    ranking: Ranking,
    points: Sequence[tuple[RankedRow, tuple[float, float]]],
) -> None:
    """Draw the jobs, with optimal ones on top, and a legend of marks."""
    counts = sorted({_used(row) for row, _ in points})
    for row, place in sorted(points, key=lambda point: point[0].pareto):
        size = 6.5 if row.best else 5.0 if row.pareto else 4.0
        index = min(counts.index(_used(row)), _CLASSES - 1)
        tip = point_tip(ranking, row)
        mark(drawing, panel.place(*place), index, tip, solid=row.pareto, size=size)
    side = panel.right + 16
    drawing.text(side, TOP + 8, "devices used", size=TEXT, fill=IN_PAGE.muted)
    legend(drawing, side, TOP + 28, _class_names(counts))
    below = TOP + 28 + 18 * min(len(counts), _CLASSES) + 10
    for line, note in enumerate(("solid:", "Pareto-optimal", "hollow:", "the others")):
        drawing.text(side, below + 15 * line, note, size=10, fill=IN_PAGE.muted)


def _used(row: RankedRow) -> int:
    return int(number(row.row, "devices_used") or 0)


def point_tip(ranking: Ranking, row: RankedRow) -> str:
    """Return the tooltip of a job: its settings and costs."""
    settings = " ".join(f"{key}={cell(row.row, key)}" for key in ranking.keys)
    used = number(row.row, "devices_used")
    costs = [f"{m.text(row.row)} {m.unit}" for m in (ranking.by, ranking.against)]
    costs += [f"{counted(int(used), 'device')} used"] if used is not None else []
    return f"{settings or row.row.name}\n{', '.join(costs)}"


def _frontier_line(drawing: Drawing, panel: Panel, places: Sequence[tuple[float, float]]) -> None:
    """Draw the frontier as steps, below which there are no jobs."""
    optimal = frontier(places)
    corners = sorted({point for point, is_on in zip(places, optimal, strict=True) if is_on})
    if len(corners) < 2:
        return
    x, y = panel.place(*corners[0])
    steps = [f"M{x:.1f} {y:.1f}"]
    for point in corners[1:]:
        x, y = panel.place(*point)
        steps.append(f"H{x:.1f}V{y:.1f}")
    drawing.path("".join(steps), stroke=IN_PAGE.muted, width=1.5, dashes="5 3")


def _class_names(counts: Sequence[int]) -> list[str]:
    if len(counts) <= _CLASSES:
        return [str(count) for count in counts]
    return [*(str(count) for count in counts[: _CLASSES - 1]), f"{counts[_CLASSES - 1]} or more"]


def _label_best(
    drawing: Drawing,
    panel: Panel,
    ranking: Ranking,
    row: RankedRow,
    point: tuple[float, float],
) -> None:
    """Label the best job's point, on the side that has room."""
    keys = [key for key in ranking.keys if key not in ranking.model_keys]
    named = " · ".join(cell(row.row, key) for key in keys)
    label = cut_text(f"best: {named}" if named else "best", panel.width - 20)
    x, y = panel.place(*point)
    is_left = x + 10 + text_width(label, 11) > panel.right
    anchor, offset = ("end", -10.0) if is_left else ("start", 10.0)
    if is_left and x - 10 - text_width(label, 11) < panel.x:
        anchor, offset, x, y = "end", 0.0, panel.right - 4, y + 16
    drawing.text(x + offset, y + 16, label, size=TEXT, anchor=anchor, bold=True, halo=True)
