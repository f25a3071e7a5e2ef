"""The tables of a report in the terminal: jobs ranked, and two sweeps job by job."""

from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING

from runner.output.metrics import LAST_SPARE
from runner.output.terminal import add_numbers, counted, empty_table, show
from runner.report.compare import (
    Comparison,
    Pair,
    best_lines,
    change_text,
    cost_text,
    only_lines,
    title,
    why_none,
)
from runner.report.findings import status_word, sweep_reasons
from runner.report.ranking import Measure, RankedRow, Ranking, best_rows, ranked
from runner.report.sweep_data import (
    SweepData,
    SweepRow,
    cell,
    headings,
    in_parts,
    shared_settings,
)

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["show_comparison", "show_sweep"]

_Cell = Callable[[SweepRow, str], str]
"""The setting of a row by a key, as it is shown."""
_MOST_REASONS = 8
_GAP = 2
"""Blanks between columns."""
_MARKS = {"best": "*", "pareto": "+", "equal": "=", "": ""}
_MARGIN = 4
"""The column of marks, and a blank at the end."""
_HYPHENATED = {
    "microbatch": "micro-\nbatch",
    "microbatches": "micro-\nbatches",
    "checkpointing": "check-\npointing",
}
"""Words of headings that are wider than the cells below."""


def show_sweep(data: SweepData, most: int | None, all_with: str = "-v") -> None:
    """Print the ranked table, at most `most` rows of it (None: all), and why jobs have no result.

    `all_with` is the option that shows all rows.

    The best comes first for each model, those without a result last; a choice that all share is in
    the title. The best of each model has a ``*``; what else is Pareto-optimal in time, peak memory
    and devices used a ``+``; of equals only the first, the others a ``=``. A narrow terminal lacks
    the less important numbers, or has settings of several parts in several lines.
    """
    from rich.console import Console

    ranking = ranked(data)
    room = len(data.rows) if most is None else max(most, 1)
    rows = best_rows(ranking, room)
    others = ranking.others[: room - len(rows)]
    table = _ranking_table(ranking, rows, others, Console().width)
    notes = _ranking_notes(ranking, rows, len(others), all_with)
    # A table would break its title at its own width.
    show(_title(ranking), table, *notes, *sweep_reasons(data, _MOST_REASONS))


def _title(ranking: Ranking) -> str:
    data = ranking.data
    shared = [f"{key}={text}" for key, text in shared_settings(data, ranking.keys).items()]
    under_way = [f"{n} under way"] if (n := ranking.count("running")) else []
    return ", ".join([counted(len(data.rows), "run"), *under_way, *shared])


def _ranking_table(
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
        word = status_word(other)
        blank = ["-"] * (len(measures) - 1)
        table.add_row("", *(show_cell(other, key) for key in keys), word, *blank, style="dim")
    return table


def _broken(heading: str, widest: int) -> str:
    """Return a heading that is no wider than the cells below, if its words let it be."""
    whole = _HYPHENATED.get(heading, heading)
    return whole if len(whole) <= widest else whole.replace(" ", "\n")


def _that_fit(ranking: Ranking, columns: int) -> tuple[tuple[Measure, ...], _Cell]:
    """Return the measures that there is room for, and how settings are shown."""
    widths = {measure: _number_width(ranking, measure) for measure in ranking.measures}
    kept = ranking.measures
    for show_cell, most_spare in ((cell, LAST_SPARE - 1), (in_parts, LAST_SPARE)):
        used = _settings_width(ranking, show_cell)
        for left_out in range(most_spare + 1):
            kept = tuple(m for m in ranking.measures if not 0 < m.metric.spare <= left_out)
            if used + sum(widths[measure] for measure in kept) <= columns:
                return kept, show_cell
    return kept, in_parts


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
    words = [len(status_word(row)) for row in ranking.others] if measure is ranking.by else []
    return _GAP + max(*heading, *numbers, *words, 0)


def _width(text: str) -> int:
    """Return how narrow a column may be: words are not cut."""
    return max((len(word) for word in _HYPHENATED.get(text, text).split()), default=0)


def _heading(measure: Measure) -> str:
    if per := measure.metric.per:
        return f"{measure.unit} per\n{_HYPHENATED.get(per, per)}"
    return f"{measure.name}\n{measure.unit}" if measure.unit else measure.name.replace(" ", "\n")


def _ranking_notes(
    ranking: Ranking, shown: Sequence[RankedRow], others: int, all_with: str
) -> list[str]:
    lines = []
    left = len(ranking.finished) - len(shown)
    left_others = len(ranking.others) - others
    if left or left_others:
        counts = [f"{left} that rank below"] if left else []
        counts += [f"{left_others} without a result"] if left_others else []
        lines.append(f"not shown: {', '.join(counts)}; {all_with} shows all")
    if shown:
        least = "least" if ranking.by.metric.per else "lowest"
        of_model = " for its model" if len(ranking.models) > 1 else ""
        lines.append(f"* {least} {ranking.by.name}{of_model}")
    if any(row.mark == "pareto" for row in shown):
        lines.append("+ Pareto-optimal in time, peak and devices used")
    if any(row.mark == "equal" for row in shown):
        lines.append("= costs the same as one above")
    return lines


# Two sweeps.

_MOST_ONLY = 8


def show_comparison(comparison: Comparison, most: int) -> None:
    """Print what each job cost before and after, at most `most` rows, and the best of each.

    The largest change comes first. Where the terminal is too narrow, memory is only its change.
    """
    from rich.console import Console

    show(title(comparison))
    if comparison.pairs:
        show(_comparison_table(comparison, most, Console().width))
    notes = _comparison_notes(comparison, most)
    show(*notes, *best_lines(comparison), *only_lines(comparison, _MOST_ONLY))


def _comparison_notes(comparison: Comparison, most: int) -> list[str]:
    count, same = len(comparison.pairs), comparison.same_runs
    lines = [why_none(comparison)] if not count else []
    if count > most:
        lines.append(f"not shown: {count - most} that change less; --rows {count} shows all")
    if same:
        lines.append(f"{counted(same, 'job')} of {count}: one run that both sweeps have")
    return lines


def _comparison_table(comparison: Comparison, most: int, columns: int) -> "Table":
    settings = list(headings(comparison.keys).values())
    heads = [*settings, *_change_headings(comparison.time), *_change_headings(comparison.memory)]
    every = range(len(heads))
    # The peaks themselves are what a narrow terminal does without, before settings are broken.
    fewer = [index for index in every if index not in (len(heads) - 3, len(heads) - 2)]
    for show_cell, kept in ((cell, every), (cell, fewer), (in_parts, fewer)):
        rows = [_comparison_cells(comparison, pair, show_cell) for pair in comparison.pairs[:most]]
        widths = [_GAP + _widest([heads[i], *(row[i] for row in rows)]) for i in kept]
        if sum(widths) + 1 <= columns:
            break
    table = empty_table("")
    for index in kept:
        if index < len(settings):
            table.add_column(heads[index], overflow="fold")
        else:
            add_numbers(table, heads[index])
    for row in rows:
        table.add_row(*(row[index] for index in kept))
    return table


def _change_headings(measure: Measure) -> list[str]:
    per = measure.metric.per
    name = f"time per\n{_HYPHENATED.get(per, per)}" if per else measure.name
    sides = [f"{name}\n{side}\n{measure.unit}" for side in ("before", "after")]
    return [*sides, f"{name}\nchange\n%"]


def _comparison_cells(comparison: Comparison, pair: Pair, show_cell: _Cell) -> list[str]:
    cells = [show_cell(pair.after, key) for key in comparison.keys]
    for measure in (comparison.time, comparison.memory):
        cells += [cost_text(row, measure) for row in (pair.before, pair.after)]
        cells.append(change_text(pair, measure))
    return cells


def _widest(cells: Sequence[str]) -> int:
    return max(len(line) for text in cells for line in text.splitlines())
