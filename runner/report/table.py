"""The tables of a report in the terminal: ranked jobs, and two sweeps job by job."""

from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING, NamedTuple

from runner.output.metrics import LAST_SPARE
from runner.output.terminal import (
    COLUMN_GAP,
    add_numbers,
    columns_shown,
    counted,
    empty_table,
    show,
)
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
from runner.report.findings import status_word, sweep_reasons, traded
from runner.report.ranking import Measure, RankedRow, Ranking, best_rows, ranked
from runner.report.sweep_data import (
    SweepData,
    SweepRow,
    cell,
    headings,
    shared_settings,
    shortened,
)

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["show_comparison", "show_sweep"]

_Cell = Callable[[SweepRow, str], str]
"""Returns the setting of a row by key, as text."""
_MOST_REASONS = 8
_GAP = COLUMN_GAP
_LEAST_SETTING = 9
"""Least width of a shortened setting, in characters."""
_MARKS = {"best": "*", "pareto": "+", "equal": "=", "": ""}
_MARGIN = 4
"""Width of the column of marks, and of the space at the end."""
_HYPHENATED = {
    "microbatch": "micro-\nbatch",
    "microbatches": "micro-\nbatches",
    "checkpointing": "check-\npointing",
}
"""Hyphenation of words in headings that are wider than their cells."""


def show_sweep(data: SweepData, max_rows: int | None, all_with: str = "-v") -> None:
    """Print the ranked table, up to `max_rows` rows (None: all), and why jobs have no result.

    `all_with` is the option that shows all rows.

    The best jobs come first for each model, and those without a result last. Choices shared by all
    jobs are in the title. The best job of each model is marked ``*``, and other Pareto-optimal ones
    ``+``. Of ties only the first is marked so, and the others ``=``. On a narrow terminal less
    important numbers are dropped, long settings shortened, or the last settings left out.
    """
    ranking = ranked(data)
    # A note on a single hidden row would take a line, too.
    available = (
        len(data.rows) if max_rows is None or len(data.rows) <= max_rows + 1 else max(max_rows, 1)
    )
    rows = best_rows(ranking, available)
    others = ranking.others[: available - len(rows)]
    fitting = _that_fit(ranking, columns_shown())
    table = _ranking_table(ranking, rows, others, fitting)
    notes = _ranking_notes(ranking, rows, len(others), all_with)
    if fitting.show_cell is not cell:
        notes.append("… settings are shortened to fit; the report has them whole")
    if left_out := ranking.keys[len(fitting.keys) :]:
        notes.append(f"not shown, for want of columns: {', '.join(left_out)}; the report has them")
    # Printed separately, since a table would wrap its title at its own width.
    show(_title(ranking), table, *notes, *sweep_reasons(data, _MOST_REASONS))


def _title(ranking: Ranking) -> str:
    data = ranking.data
    shared = [f"{key}={text}" for key, text in shared_settings(data, ranking.keys).items()]
    under_way = [f"{n} under way"] if (n := ranking.count("running")) else []
    return ", ".join([counted(len(data.rows), "run"), *under_way, *shared])


def _ranking_table(
    ranking: Ranking, rows: Sequence[RankedRow], others: Sequence[SweepRow], fitting: "_Fitting"
) -> "Table":
    """Return a table of `rows`, which have a result, and `others`."""
    data = ranking.data
    measures, keys, show_cell = fitting
    table = empty_table("")
    table.add_column("")
    for key, heading in headings(keys).items():
        widest = max((len(show_cell(row, key)) for row in data.rows), default=0)
        table.add_column(_broken(heading, widest))
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
    """Return a heading broken into lines no wider than its cells, if its words allow it."""
    whole = _HYPHENATED.get(heading, heading)
    return whole if len(whole) <= widest else whole.replace(" ", "\n")


class _Fitting(NamedTuple):
    """The columns of a table that fit the terminal."""

    measures: tuple[Measure, ...]
    keys: tuple[str, ...]
    """The first settings."""
    show_cell: _Cell
    """Shows a setting of a job, perhaps shortened."""


def _that_fit(ranking: Ranking, columns: int) -> _Fitting:
    """Return the measures and settings that fit."""
    widths = {measure: _number_width(ranking, measure) for measure in ranking.measures}
    settings = _settings_widths(ranking)
    used = _MARGIN + sum(settings.values())
    shown = ranking.measures
    for left_out in range(LAST_SPARE):
        shown = tuple(m for m in ranking.measures if not 0 < m.metric.spare <= left_out)
        if used + sum(widths[measure] for measure in shown) <= columns:
            return _Fitting(shown, ranking.keys, cell)
    for left_out in (LAST_SPARE - 1, LAST_SPARE):
        shown = tuple(m for m in ranking.measures if not 0 < m.metric.spare <= left_out)
        available = columns - _MARGIN - sum(widths[measure] for measure in shown)
        least = {key: min(width, _LEAST_SETTING + _GAP) for key, width in settings.items()}
        if sum(least.values()) <= available:
            break
    keys = ranking.keys
    while len(keys) > 1 and sum(least[key] for key in keys) > available:
        keys = keys[:-1]
    settings = {key: settings[key] for key in keys}
    if sum(settings.values()) <= available:
        return _Fitting(shown, keys, cell)
    return _Fitting(shown, keys, _shortened_to(ranking.data.rows, settings, available))


def _settings_widths(ranking: Ranking) -> dict[str, int]:
    shown = headings(ranking.keys)
    return {
        key: _GAP + max(_width(shown[key]), *(len(cell(row, key)) for row in ranking.data.rows), 0)
        for key in ranking.keys
    }


def _shortened_to(rows: Sequence[SweepRow], widths: dict[str, int], available: int) -> _Cell:
    """Return a function that fits settings of `widths` into `available`, shortening the widest."""
    narrowed = dict(widths)
    while sum(narrowed.values()) > available:
        widest = max(narrowed, key=lambda key: narrowed[key])
        if narrowed[widest] <= _LEAST_SETTING + _GAP:
            break
        narrowed[widest] -= 1
    texts = {
        key: shortened([cell(row, key) for row in rows], narrowed[key] - _GAP) for key in widths
    }
    return lambda row, key: texts[key][cell(row, key)]


def _number_width(ranking: Ranking, measure: Measure) -> int:
    numbers = [len(measure.text(row.row)) for row in ranking.finished]
    # Headings of numbers wrap only at explicit line breaks.
    heading = [len(line) for line in _heading(measure).splitlines()]
    # The first column of numbers has the status of jobs without a result.
    statuses = [len(status_word(row)) for row in ranking.others] if measure is ranking.by else []
    return _GAP + max(*heading, *numbers, *statuses, 0)


def _width(text: str) -> int:
    """Return the least width of a heading, whose words are not cut."""
    return max((len(word) for word in _HYPHENATED.get(text, text).split()), default=0)


def _heading(measure: Measure) -> str:
    if per := measure.metric.per:
        return f"{measure.unit} per\n{_HYPHENATED.get(per, per)}"
    return f"{measure.name}\n{measure.unit}" if measure.unit else measure.name.replace(" ", "\n")


def _ranking_notes(
    ranking: Ranking, shown: Sequence[RankedRow], others: int, all_with: str
) -> list[str]:
    lines = []
    hidden = len(ranking.finished) - len(shown)
    hidden_others = len(ranking.others) - others
    if hidden or hidden_others:
        counts = [f"{hidden} that rank below"] if hidden else []
        counts += [f"{hidden_others} without a result"] if hidden_others else []
        lines.append(f"not shown: {', '.join(counts)}; {all_with} shows all")
    if shown:
        best_word = "least" if ranking.by.metric.per else "lowest"
        of_model = " for its model" if len(ranking.models) > 1 else ""
        lines.append(f"* {best_word} {ranking.by.name}{of_model}")
    if any(row.mark == "pareto" for row in shown):
        lines.append(f"+ Pareto-optimal in {traded(ranking)} and devices used")
    if any(row.mark == "equal" for row in shown):
        lines.append("= costs the same as one above")
    return lines


# Two sweeps.

_MOST_ONLY = 8


def show_comparison(comparison: Comparison, max_rows: int) -> None:
    """Print the costs of up to `max_rows` jobs before and after, and the best job of each sweep.

    The largest change comes first. On a narrow terminal only the change of memory is shown.
    """
    show(title(comparison))
    if comparison.pairs:
        show(_comparison_table(comparison, max_rows, columns_shown()))
    notes = _comparison_notes(comparison, max_rows)
    show(*notes, *best_lines(comparison), *only_lines(comparison, _MOST_ONLY))


def _comparison_notes(comparison: Comparison, max_rows: int) -> list[str]:
    count, same = len(comparison.pairs), comparison.same_runs
    lines = [why_none(comparison)] if not count else []
    if count > max_rows:
        lines.append(f"not shown: {count - max_rows} that change less; --rows {count} shows all")
    if same:
        lines.append(f"{counted(same, 'job')} of {count}: one run that both sweeps have")
    return lines


def _comparison_table(comparison: Comparison, max_rows: int, columns: int) -> "Table":
    settings = list(headings(comparison.keys).values())
    heads = [*settings, *_change_headings(comparison.time), *_change_headings(comparison.memory)]
    all_columns = range(len(heads))
    # A narrow terminal drops the peaks before settings are shortened.
    fewer = [index for index in all_columns if index not in (len(heads) - 3, len(heads) - 2)]
    for shown_columns in (all_columns, fewer):
        rows = [_comparison_cells(comparison, pair, cell) for pair in comparison.pairs[:max_rows]]
        widths = [_GAP + _widest([heads[i], *(row[i] for row in rows)]) for i in shown_columns]
        if sum(widths) + 1 <= columns:
            break
    else:
        available = columns - 1 - sum(widths[len(settings) :])
        of_settings = dict(zip(comparison.keys, widths, strict=False))
        after = [pair.after for pair in comparison.pairs]
        show_cell = _shortened_to(after, of_settings, available)
        rows = [
            _comparison_cells(comparison, pair, show_cell) for pair in comparison.pairs[:max_rows]
        ]
    table = empty_table("")
    for index in shown_columns:
        if index < len(settings):
            table.add_column(heads[index])
        else:
            add_numbers(table, heads[index])
    for row in rows:
        table.add_row(*(row[index] for index in shown_columns))
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
