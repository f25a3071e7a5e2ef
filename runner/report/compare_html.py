"""Two sweeps job by job, as a section of a report."""

import math
from collections.abc import Sequence
from html import escape

from runner.output.terminal import counted
from runner.report.compare import (
    Comparison,
    Pair,
    best_lines,
    change_pct,
    change_text,
    cost_text,
    only_lines,
    title,
    why_none,
)
from runner.report.measures import Measure, finished
from runner.report.rows import SweepRow
from runner.report.settings import cell, headings

__all__ = ["comparison_html"]

_OPEN = 6
"""As many jobs without a counterpart are listed; more at a click."""


def comparison_html(comparison: Comparison, named: str) -> str:
    """Return the section: every pair, the largest change first, and what is in one alone.

    `named` says which sweep it is compared with. A click on a heading sorts.
    """
    lines = best_lines(comparison)
    if same := comparison.same_runs:
        lines.insert(0, f"{counted(same, 'job')}: one run that both sweeps have")
    items = _items(lines) + _folded(only_lines(comparison))
    table = _table(comparison) if comparison.pairs else f"<p>{escape(why_none(comparison))}</p>"
    return (
        f'<section class="long compared"><h2>Compared with {escape(named)}</h2>'
        f'<p class="muted">{escape(title(comparison))}</p>{table}'
        f'<ul class="reasons">{items}</ul></section>\n'
    )


def _folded(lines: Sequence[str]) -> str:
    if len(lines) <= _OPEN:
        return _items(lines)
    words = f"{counted(len(lines), 'job')} in one of the two alone"
    return f"<li><details><summary>{words}</summary><ul>{_items(lines)}</ul></details></li>"


def _items(lines: Sequence[str]) -> str:
    return "".join(f"<li>{escape(line)}</li>" for line in lines)


def _table(comparison: Comparison) -> str:
    heads = [_head(escape(name), "") for name in headings(comparison.keys).values()]
    for measure in (comparison.time, comparison.memory):
        sides = (f"before, {measure.unit}", f"after, {measure.unit}", "change, %")
        name = escape(measure.name)
        heads += [_head(f"{name}<br><small>{side}</small>", ' class="n"') for side in sides]
    body = "\n".join(_row(comparison, pair) for pair in comparison.pairs)
    return (
        f'<div class="scroll"><table class="sortable" data-most="{len(comparison.pairs)}">'
        f"<thead><tr>{''.join(heads)}</tr></thead>\n<tbody>\n{body}\n</tbody></table></div>"
    )


def _head(words: str, css: str) -> str:
    return f'<th scope="col"{css}><button type="button">{words}</button></th>'


def _row(comparison: Comparison, pair: Pair) -> str:
    cells = [f"<td>{escape(cell(pair.after, key))}</td>" for key in comparison.keys]
    for measure in (comparison.time, comparison.memory):
        cells += [_cost(row, measure) for row in (pair.before, pair.after)]
        cells.append(_change(pair, measure))
    return f"<tr>{''.join(cells)}</tr>"


def _cost(row: SweepRow, measure: Measure) -> str:
    value = measure.value(row) if finished(row) else None
    key = "" if value is None else f"{value:.7g}"
    return f'<td class="n" data-v="{key}">{escape(cost_text(row, measure))}</td>'


def _change(pair: Pair, measure: Measure) -> str:
    change = change_pct(pair, measure)
    key = "" if change is None or math.isinf(change) else f"{change:.7g}"
    css = "n" if not key or change == 0 else "n worse" if float(key) > 0 else "n better"
    return f'<td class="{css}" data-v="{key}">{change_text(pair, measure)}</td>'
