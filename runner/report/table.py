"""The ranked table of a sweep in the terminal."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from runner.report.measures import Measure
from runner.report.ranking import RankedRow, Ranking, best_rows, ranked
from runner.report.reasons import STATUS_WORDS, sweep_reasons
from runner.report.rows import SweepData, SweepRow
from runner.report.settings import cell, headings, shared_settings
from runner.terminal import add_numbers, counted, empty_table, show

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["MOST_ROWS", "show_sweep"]

MOST_ROWS = 20
"""What fits a terminal beside the command and the reasons."""
_MOST_REASONS = 8
_GAP = 2
"""Blanks between columns."""
_SPARE = ("step_ms", "optimality_gap_pct", "bubble_pct", "partitions", "throughput_per_s")
"""Measures that a narrow terminal does without, the first first."""
_HYPHENATED = {"microbatches": "micro-\nbatches"}
"""Headings that are wider than what stands below them, and would be cut anywhere."""
_MEASURE_HEADINGS = {
    "microbatch_ms": "{unit} per\nmicro-\nbatch",
    "devices_used": "devices\nused",
    "measured_ms": "measured\n{unit}",
}


def show_sweep(data: SweepData, most: int | None) -> None:
    """Print the ranked table, at most `most` rows of it (None: all), and why others are missing.

    The best comes first for each model, those without a result last; a choice that all share is in
    the title. The best of each model, equals included, has a ``*``; what else is Pareto-optimal in
    time, peak memory and devices used has a ``+``. Where the terminal is too narrow for all
    numbers, the less important ones are left out.
    """
    from rich.console import Console

    ranking = ranked(data)
    room = len(data.rows) if most is None else max(most, 1)
    rows = best_rows(ranking, room)
    others = ranking.others[: room - len(rows)]
    table = _table(ranking, rows, others, Console().width)
    notes = _notes(ranking, rows, len(others))
    show(table, *notes, *sweep_reasons(data, _MOST_REASONS))


def _table(
    ranking: Ranking, rows: Sequence[RankedRow], others: Sequence[SweepRow], columns: int
) -> "Table":
    """Return `rows`, which have a result, and `others`, of one width that suits `columns`."""
    data, keys = ranking.data, ranking.keys
    shared = [f"{key}={text}" for key, text in shared_settings(data, keys).items()]
    table = empty_table(", ".join([counted(len(data.rows), "run"), *shared]))
    table.add_column("")
    for heading in headings(keys).values():
        table.add_column(_HYPHENATED.get(heading, heading), overflow="fold")
    measures = _that_fit(ranking, columns)
    add_numbers(table, *(_heading(measure) for measure in measures))
    for row in rows:
        settings = [cell(row.row, key) for key in keys]
        numbers = [measure.text(row.row) for measure in measures]
        mark = "*" if row.best else "+" if row.pareto else ""
        table.add_row(mark, *settings, *numbers, style="bold" if row.best else "")
    for other in others:
        word = STATUS_WORDS.get(other.status, "failed")
        blank = ["-"] * (len(measures) - 1)
        table.add_row("", *(cell(other, key) for key in keys), word, *blank, style="dim")
    return table


def _that_fit(ranking: Ranking, columns: int) -> tuple[Measure, ...]:
    """Return the measures without those that there is no room for."""
    shown = headings(ranking.keys)
    used = 3 + sum(
        _GAP + max(_width(shown[key]), *(len(cell(row, key)) for row in ranking.data.rows))
        for key in ranking.keys
    )
    kept = list(ranking.measures)
    for key in _SPARE:
        if used + sum(_number_width(ranking, measure) for measure in kept) <= columns:
            break
        kept = [measure for measure in kept if measure.key != key]
    return tuple(kept)


def _number_width(ranking: Ranking, measure: Measure) -> int:
    numbers = (len(measure.text(row.row)) for row in ranking.finished)
    return _GAP + max(_width(_heading(measure)), *numbers, 0)


def _width(heading: str) -> int:
    """Return how narrow a column may be: words are not cut."""
    return max(len(word) for word in _HYPHENATED.get(heading, heading).split())


def _heading(measure: Measure) -> str:
    form = _MEASURE_HEADINGS.get(measure.key)
    if form:
        return form.format(unit=measure.unit)
    return f"{measure.name}\n{measure.unit}" if measure.unit else measure.name


def _notes(ranking: Ranking, shown: Sequence[RankedRow], others: int) -> list[str]:
    lines = []
    left = len(ranking.finished) - len(shown)
    left_others = len(ranking.others) - others
    if left or left_others:
        counts = [f"{left} that rank below"] if left else []
        counts += [f"{left_others} without a result"] if left_others else []
        lines.append(f"not shown: {', '.join(counts)}")
    if shown:
        least = {
            "latency_ms": "lowest latency",
            "microbatch_ms": "least time per microbatch",
            "example_ms": "least time per example",
        }[ranking.by.key]
        lines.append(f"* {least}" + (" for its model" if len(ranking.models) > 1 else ""))
    if any(row.pareto and not row.best for row in shown):
        lines.append("+ Pareto-optimal in time, peak and devices used")
    return lines
