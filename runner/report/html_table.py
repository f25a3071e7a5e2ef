"""The ranked table of a report."""

import re
from collections.abc import Sequence
from html import escape
from itertools import pairwise
from pathlib import Path

from runner.report.job_folders import job_links
from runner.report.measures import Measure
from runner.report.ranking import RankedRow, Ranking, best_rows
from runner.report.reasons import STATUS_WORDS
from runner.report.rows import SweepRow
from runner.report.settings import cell, headings

__all__ = ["MOST_ROWS", "links_html", "table_html"]

_SYLLABLE = re.compile(r"(?<=micro)(?=batch)|(?<=check)(?=pointing)")
_MARKS = {
    "best": ("★", "best"),
    "pareto": ("◆", "Pareto-optimal"),
    "equal": ("=", "costs the same as one above"),
    "": ("", ""),
}
MOST_ROWS = 16
"""Rows that are shown at first: what fits a screen beside the plot."""


def table_html(ranking: Ranking, place: Path | None = None) -> str:
    """Return the table: the best first for each model, those without a result last.

    With the folder `place` each row links to the files of its job, from there. The table can be
    read without script; with it, a click on a heading sorts. What is more than a screen of rows, of
    each model about as many, is behind a checkbox.
    """
    shown = best_rows(ranking, MOST_ROWS)
    first = {id(row) for row in (*shown, *ranking.others[: MOST_ROWS - len(shown)])}
    lines: list[tuple[object, list[str], str]]
    lines = [(row, *_finished_row(ranking, row, place)) for row in ranking.finished]
    lines += [(row, *_other_row(ranking, row, place)) for row in ranking.others]
    for (before, after), (_, names, _) in zip(pairwise(ranking.finished), lines[1:], strict=False):
        if before.model != after.model:
            names.append("next")
    body = "\n".join(
        f"<tr{_classes(names if id(row) in first else [*names, 'more'])}>{cells}</tr>"
        for row, names, cells in lines
    )
    everything = (
        f'<input type="checkbox" id="all"><label for="all"> all {len(lines)} rows</label>'
        if len(lines) > MOST_ROWS
        else ""
    )
    return (
        f'{everything}<div class="scroll"><table class="sortable" data-most="{MOST_ROWS}">'
        f"<thead><tr>{_head(ranking)}</tr></thead>\n<tbody>\n{body}\n</tbody></table></div>"
    )


def _classes(names: Sequence[str]) -> str:
    return f' class="{" ".join(names)}"' if names else ""


def _head(ranking: Ranking) -> str:
    cells = ["<th></th>"]
    cells += [_head_cell(name) for name in headings(ranking.keys).values()]
    cells += [_head_cell(measure.name, measure.unit, "n") for measure in ranking.measures]
    return "".join([*cells, "<th>run</th>"])


def _head_cell(name: str, unit: str = "", css: str = "") -> str:
    small = f"<br><small>{escape(unit)}</small>" if unit else ""
    return (
        f'<th scope="col"{_classes([css] if css else [])}>'
        f'<button type="button">{_hyphenated(name)}{small}</button></th>'
    )


def _hyphenated(name: str) -> str:
    """Return a heading that may be broken where a long word may be."""
    return "&shy;".join(map(escape, _SYLLABLE.split(name)))


def _finished_row(
    ranking: Ranking, ranked_row: RankedRow, place: Path | None
) -> tuple[list[str], str]:
    row = ranked_row.row
    mark, title = _MARKS[ranked_row.mark]
    marked = f'<td title="{title}">{mark}</td>' if mark else "<td></td>"
    numbers = "".join(_number(measure, row) for measure in ranking.measures)
    return (
        ["best"] if ranked_row.best else [],
        f"{marked}{_settings(ranking, row)}{numbers}{_run(row, place)}",
    )


def _number(measure: Measure, row: SweepRow) -> str:
    value = measure.value(row)
    key = "" if value is None else f"{value:.7g}"
    return f'<td class="n" data-v="{key}">{escape(measure.text(row))}</td>'


def _settings(ranking: Ranking, row: SweepRow) -> str:
    return "".join(f"<td>{escape(cell(row, key))}</td>" for key in ranking.keys)


def _other_row(ranking: Ranking, row: SweepRow, place: Path | None) -> tuple[list[str], str]:
    word = escape(STATUS_WORDS.get(row.status, "failed"))
    title = f' title="{escape(row.error[:300])}"' if row.error else ""
    blank = '<td class="n" data-v="">-</td>' * (len(ranking.measures) - 1)
    status = f'<td class="n status" data-v=""{title}>{word}</td>'
    return ["none"], f"<td></td>{_settings(ranking, row)}{status}{blank}{_run(row, place)}"


def _run(row: SweepRow, place: Path | None) -> str:
    """Return the cell with the run's id, which a click selects whole, and a link to its files."""
    # What else the job has to look at is one click further: a row has no room for it.
    link = links_html(row, place, most=1)
    if row.run_id is not None:
        run_id = escape(row.run_id)
        name = f'<span class="id mono" title="{run_id}">{run_id}</span>'
    else:
        name = escape(row.folder.rpartition("/")[2]) if row.folder else ""
    return f"<td>{name}{' ' if name and link else ''}{link}</td>"


def links_html(row: SweepRow, place: Path | None, most: int | None = None) -> str:
    """Return links from `place` to the job's folder and its figures, the first `most` of them."""
    links = job_links(row, place)[:most] if place else []
    return " ".join(f'<a href="{escape(address)}">{words}</a>' for address, words in links)
