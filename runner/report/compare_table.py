"""Two sweeps job by job, as a table in the terminal."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

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
from runner.report.measures import Measure
from runner.report.rows import SweepRow
from runner.report.settings import cell, headings, in_parts

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["show_comparison"]

_MOST_ONLY = 8
_GAP, _MARGIN = 2, 1
_PER = {"example_ms": "time per\nexample", "microbatch_ms": "time per\nmicro-\nbatch"}


def show_comparison(comparison: Comparison, most: int) -> None:
    """Print what each job cost before and after, at most `most` rows, and the best of each.

    The largest change comes first. Where the terminal is too narrow, memory is only its change.
    """
    from rich.console import Console

    show(title(comparison))
    if comparison.pairs:
        show(_table(comparison, most, Console().width))
    show(*_notes(comparison, most), *best_lines(comparison), *only_lines(comparison, _MOST_ONLY))


def _notes(comparison: Comparison, most: int) -> list[str]:
    count, same = len(comparison.pairs), comparison.same_runs
    lines = [why_none(comparison)] if not count else []
    if count > most:
        lines.append(f"not shown: {count - most} that change less; --rows {count} shows all")
    if same:
        lines.append(f"{counted(same, 'job')} of {count}: one run that both sweeps have")
    return lines


def _table(comparison: Comparison, most: int, columns: int) -> "Table":
    heads = [*headings(comparison.keys).values(), *_heads(comparison.time, comparison.memory)]
    every = range(len(heads))
    # The peaks themselves are what a narrow terminal does without, before settings are broken.
    fewer = [index for index in every if index not in (len(heads) - 3, len(heads) - 2)]
    for show_cell, kept in ((cell, every), (cell, fewer), (in_parts, fewer)):
        rows = [_cells(comparison, pair, show_cell) for pair in comparison.pairs[:most]]
        if sum(_width(heads[i], [row[i] for row in rows]) for i in kept) + _MARGIN <= columns:
            break
    table, settings = empty_table(""), len(comparison.keys)
    for index in kept:
        if index < settings:
            table.add_column(heads[index], overflow="fold")
        else:
            add_numbers(table, heads[index])
    for row in rows:
        table.add_row(*(row[index] for index in kept))
    return table


def _cells(
    comparison: Comparison, pair: Pair, show_cell: Callable[[SweepRow, str], str]
) -> list[str]:
    found = [show_cell(pair.after, key) for key in comparison.keys]
    for measure in (comparison.time, comparison.memory):
        sides = [cost_text(row, measure) for row in (pair.before, pair.after)]
        found += [*sides, change_text(pair, measure)]
    return found


def _heads(time: Measure, memory: Measure) -> list[str]:
    per = _PER.get(time.key)
    heads = []
    for measure, of in ((time, per or time.name), (memory, memory.name)):
        heads += [f"{of}\n{side}\n{measure.unit}" for side in ("before", "after")]
        heads.append(f"{of}\nchange\n%")
    return heads


def _width(heading: str, cells: Sequence[str]) -> int:
    return _GAP + max(len(line) for text in (heading, *cells) for line in text.splitlines())
