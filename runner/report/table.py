"""The ranked table of a sweep in the terminal."""

from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING

from runner.output.terminal import add_numbers, counted, empty_table, show
from runner.report.measures import Measure
from runner.report.ranking import RankedRow, Ranking, best_rows, ranked
from runner.report.reasons import STATUS_WORDS, sweep_reasons
from runner.report.rows import SweepData, SweepRow
from runner.report.settings import cell, headings, in_parts, shared_settings

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["MOST_ROWS", "show_sweep"]

MOST_ROWS = 20
"""What fits a terminal beside the command and the reasons."""
_Cell = Callable[[SweepRow, str], str]
"""The setting of a row by a key, as it is shown."""
_MOST_REASONS = 8
_GAP = 2
"""Blanks between columns."""
_SPARE = (
    "step_ms",
    "optimality_gap_pct",
    "bubble_pct",
    "partitions",
    "throughput_per_s",
    "time_error_pct",
    "devices_used",
)
"""Measures that a narrow terminal does without, the first first."""
_LAST = "measured_ms"
"""What goes only where settings have several lines already."""
_MARKS = {"best": "*", "pareto": "+", "equal": "=", "": ""}
_MARGIN = 4
"""The column of marks, and a blank at the end."""
_HYPHENATED = {"microbatches": "micro-\nbatches", "checkpointing": "check-\npointing"}
"""Headings that are wider than what stands below them, and would be cut anywhere."""
_MEASURE_HEADINGS = {
    "microbatch_ms": "{unit} per\nmicro-\nbatch",
    "example_ms": "{unit} per\nexample",
    "devices_used": "devices\nused",
    "measured_ms": "measured\n{unit}",
}


def show_sweep(data: SweepData, most: int | None, all_with: str = "-v") -> None:
    """Print the ranked table, at most `most` rows of it (None: all), and why others are missing.

    `all_with` is what to say for all rows.

    The best comes first for each model, those without a result last; a choice that all share is in
    the title. The best of each model has a ``*``; what else is Pareto-optimal in time, peak memory
    and devices used a ``+``; of equals only the first, the others a ``=``. Where the terminal is
    too narrow for all numbers, the less important ones are left out; then settings of several parts
    get several lines.
    """
    from rich.console import Console

    ranking = ranked(data)
    room = len(data.rows) if most is None else max(most, 1)
    rows = best_rows(ranking, room)
    others = ranking.others[: room - len(rows)]
    table = _table(ranking, rows, others, Console().width)
    notes = _notes(ranking, rows, len(others), all_with)
    # A table would break its title at its own width.
    show(_title(ranking), table, *notes, *sweep_reasons(data, _MOST_REASONS))


def _title(ranking: Ranking) -> str:
    data = ranking.data
    shared = [f"{key}={text}" for key, text in shared_settings(data, ranking.keys).items()]
    under_way = [f"{n} under way"] if (n := ranking.count("running")) else []
    return ", ".join([counted(len(data.rows), "run"), *under_way, *shared])


def _table(
    ranking: Ranking, rows: Sequence[RankedRow], others: Sequence[SweepRow], columns: int
) -> "Table":
    """Return `rows`, which have a result, and `others`, of one width that suits `columns`."""
    data, keys = ranking.data, ranking.keys
    table = empty_table("")
    table.add_column("")
    measures, show_cell = _that_fit(ranking, columns)
    for key, heading in headings(keys).items():
        widest = max((_width(show_cell(row, key)) for row in data.rows), default=0)
        table.add_column(_broken(heading, widest), overflow="fold")
    add_numbers(table, *(_heading(measure) for measure in measures))
    several = len({row.model for row in rows}) < len(rows)
    for row, after in zip_longest(rows, rows[1:]):
        settings = [show_cell(row.row, key) for key in keys]
        numbers = [measure.text(row.row) for measure in measures]
        table.add_row(_MARKS[row.mark], *settings, *numbers, style="bold" if row.best else "")
        if several and after and after.model != row.model:
            table.add_section()
    for other in others:
        word = _status_word(other)
        blank = ["-"] * (len(measures) - 1)
        table.add_row("", *(show_cell(other, key) for key in keys), word, *blank, style="dim")
    return table


def _broken(heading: str, widest: int) -> str:
    """Return a heading that is no wider than the cells below, if its words let it be."""
    whole = _HYPHENATED.get(heading, heading)
    return whole if len(whole) <= widest else whole.replace(" ", "\n")


def _status_word(row: SweepRow) -> str:
    return STATUS_WORDS.get(row.status, "failed")


def _that_fit(ranking: Ranking, columns: int) -> tuple[tuple[Measure, ...], _Cell]:
    """Return the measures that there is room for, and how settings are shown."""
    widths = {measure: _number_width(ranking, measure) for measure in ranking.measures}
    kept = list(ranking.measures)
    for show_cell, spare in ((cell, _SPARE), (in_parts, (*_SPARE, _LAST))):
        used = _settings_width(ranking, show_cell)
        kept = list(ranking.measures)
        for key in (None, *spare):
            kept = [measure for measure in kept if measure.key != key]
            if used + sum(widths[measure] for measure in kept) <= columns:
                return tuple(kept), show_cell
    return tuple(kept), in_parts


def _settings_width(ranking: Ranking, show_cell: _Cell) -> int:
    """Return how wide the columns before the numbers are; cells break where they say so."""
    shown, used = headings(ranking.keys), _MARGIN
    for key in ranking.keys:
        cells = [show_cell(row, key) for row in ranking.data.rows]
        used += _GAP + max(_width(text) for text in (shown[key], *cells))
    return used


def _number_width(ranking: Ranking, measure: Measure) -> int:
    numbers = [len(measure.text(row.row)) for row in ranking.finished]
    # Columns of numbers break where a heading says so, and nowhere else.
    heading = [len(line) for line in _heading(measure).splitlines()]
    # The first column of numbers has the word for those without a result.
    words = [len(_status_word(row)) for row in ranking.others] if measure is ranking.by else []
    return _GAP + max(*heading, *numbers, *words, 0)


def _width(text: str) -> int:
    """Return how narrow a column may be: words are not cut."""
    return max((len(word) for word in _HYPHENATED.get(text, text).split()), default=0)


def _heading(measure: Measure) -> str:
    form = _MEASURE_HEADINGS.get(measure.key)
    if form:
        return form.format(unit=measure.unit)
    return f"{measure.name}\n{measure.unit}" if measure.unit else measure.name


def _notes(ranking: Ranking, shown: Sequence[RankedRow], others: int, all_with: str) -> list[str]:
    lines = []
    left = len(ranking.finished) - len(shown)
    left_others = len(ranking.others) - others
    if left or left_others:
        counts = [f"{left} that rank below"] if left else []
        counts += [f"{left_others} without a result"] if left_others else []
        lines.append(f"not shown: {', '.join(counts)}; {all_with} shows all")
    if shown:
        least = {
            "latency_ms": "lowest latency",
            "microbatch_ms": "least time per microbatch",
            "example_ms": "least time per example",
        }[ranking.by.key]
        lines.append(f"* {least}" + (" for its model" if len(ranking.models) > 1 else ""))
    if any(row.mark == "pareto" for row in shown):
        lines.append("+ Pareto-optimal in time, peak and devices used")
    if any(row.mark == "equal" for row in shown):
        lines.append("= costs the same as one above")
    return lines
