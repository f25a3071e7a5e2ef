"""The ranked table of a sweep in the terminal."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from runner.report.measures import Measure
from runner.report.ranking import RankedRow, Ranking, ranked
from runner.report.reasons import STATUS_WORDS, sweep_reasons
from runner.report.rows import SweepData
from runner.report.settings import cell, headings, shared_settings
from runner.terminal import add_numbers, counted, empty_table, show

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["MOST_ROWS", "best_rows", "show_sweep", "sweep_table"]

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
    """Print the ranked table, at most `most` rows of it (None: all), and why others are missing."""
    from rich.console import Console

    show(sweep_table(data, most, Console().width), *sweep_reasons(data, _MOST_REASONS))


def sweep_table(data: SweepData, most: int | None = None, columns: int = 120) -> "Table":
    """Return the runs of a sweep, the best first for each model, those without a result last.

    A choice that all share is in the title. The best of each model, equals included, has a ``*``;
    the others that are Pareto-optimal in time, peak memory and devices used have a ``+``. With more
    than `most` rows the caption says what is left out; where `columns` of text are too few for all
    numbers, the less important ones are.
    """
    ranking = ranked(data)
    shared = [f"{key}={text}" for key, text in shared_settings(data, ranking.keys).items()]
    table = empty_table(", ".join([counted(len(data.rows), "run"), *shared]))
    table.add_column("")
    for heading in headings(ranking.keys).values():
        table.add_column(_HYPHENATED.get(heading, heading), overflow="fold")
    measures = _that_fit(ranking, columns)
    add_numbers(table, *(_heading(measure) for measure in measures))
    room = len(data.rows) if most is None else max(most, 1)
    shown = best_rows(ranking, room)
    for row in shown:
        settings = [cell(row.row, key) for key in ranking.keys]
        numbers = [measure.text(row.row) for measure in measures]
        mark = "*" if row.best else "+" if row.pareto else ""
        table.add_row(mark, *settings, *numbers, style="bold" if row.best else "")
    others = ranking.others[: room - len(shown)]
    for other in others:
        word = STATUS_WORDS.get(other.status, "failed" if other.error else other.status)
        blank = ["-"] * (len(measures) - 1)
        table.add_row("", *(cell(other, key) for key in ranking.keys), word, *blank, style="dim")
    table.caption = "\n".join(_captions(ranking, shown, len(others)))
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


def best_rows(ranking: Ranking, most: int) -> list[RankedRow]:
    """Return at most `most` of the finished rows in their order, of each model about as many."""
    if len(ranking.finished) <= most:
        return list(ranking.finished)
    by_model = [list(ranking.of_model(model)) for model in ranking.models]
    room, kept = most, 0
    # One more of each model in turn, until there is no room.
    while room > 0:
        room -= sum(1 for rows in by_model if len(rows) > kept)
        kept += 1
    chosen = [row for rows in by_model for row in rows[:kept]]
    return chosen if room == 0 else _without_last(by_model, kept, -room)


def _without_last(
    by_model: Sequence[Sequence[RankedRow]], kept: int, surplus: int
) -> list[RankedRow]:
    """Return `kept` rows of each model, but one less of the last `surplus` that have as many."""
    full = [index for index, rows in enumerate(by_model) if len(rows) >= kept]
    less = full[len(full) - surplus :]
    return [
        row
        for index, rows in enumerate(by_model)
        for row in rows[: kept - 1 if index in less else kept]
    ]


def _captions(ranking: Ranking, shown: Sequence[RankedRow], others: int) -> list[str]:
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
        }[ranking.by.key]
        lines.append(f"* {least}" + (" for its model" if len(ranking.models) > 1 else ""))
    if any(row.pareto and not row.best for row in shown):
        lines.append("+ Pareto-optimal in time, peak and devices used")
    return lines
