"""The report of a sweep: a self-contained HTML file that needs no network.

Pages are rendered from the templates in this package, with the content prepared here.
"""

import math
import os
import re
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from fxpart.errors import CacheError
from fxpart.support.text_files import write_text
from runner.output.svg import DARK, LIGHT
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
from runner.report.findings import counts_text, status_word, sweep_reasons, traded, verdict
from runner.report.heat_map import heat_map_keys, heat_map_svg
from runner.report.parameter_plot import parameter_figure
from runner.report.pareto_plot import pareto_figure
from runner.report.ranking import Measure, Ranking, best_rows, finished, ranked
from runner.report.sweep_data import PLAN, SweepData, SweepRow, cell, headings, shared_settings

__all__ = ["comparison_html", "job_links", "kept_copy", "report_html", "write_report"]

_MOST_ROWS = 16
"""Number of rows shown at first, which fit a screen next to the plot."""
_ROW_PX, _CARD_PX = 27.0, 66.0
"""Approximate height of a row of the table, and of the frame of a figure."""
_INSTEAD = 3
"""Most models for which alternatives to the best job are listed."""
_MODELS = 8
"""Most models with a sentence and figures; others are only in the table."""
_OPEN = 6
"""Number of jobs without a counterpart listed at first; the rest is behind a click."""
_SYLLABLE = re.compile(r"(?<=micro)(?=batch)|(?<=check)(?=pointing)")
_MARKS = {
    "best": ("★", "best"),
    "pareto": ("◆", "Pareto-optimal"),
    "equal": ("=", "costs the same as one above"),
    "": ("", ""),
}
_SHOWN_FILES = {
    "partition_graph.svg": "graph",
    "memory.svg": "memory",
    "schedule.svg": "schedule",
    "serving_sweep.svg": "serving sizes",
}
"""The figures of a job to link to, with the text of the link."""
_Link = tuple[str, str]
"""The address and the text of a link."""


@cache
def _templates() -> Environment:
    templates = Environment(
        loader=PackageLoader("runner.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    templates.filters["hyphenated"] = lambda name: Markup("&shy;").join(_SYLLABLE.split(name))
    return templates


# Files.


def write_report(path: Path, data: SweepData, *, first: str = "") -> None:
    """Write the report to `path`, with links to the files of its jobs.

    `first` is a section to start with. Raises `CacheError` if it cannot be written.
    """
    write_text(path, report_html(data, path.parent, first=first))


@contextmanager
def kept_copy(path: Path, data: SweepData, *, first: str = "") -> Iterator[Path]:
    """Yield a temporary file with the name of `path` and the report without links, for a store.

    Raises `CacheError` if it cannot be written.
    """
    try:
        temporary = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
    except OSError as error:
        raise CacheError(f"cannot make a temporary file: {error.strerror}; set TMPDIR") from None
    with temporary as folder:
        copy = Path(folder, path.name)
        write_text(copy, report_html(data, first=first))
        yield copy


# The report.


def report_html(data: SweepData, place: Path | None = None, *, first: str = "") -> str:
    """Return the report as a complete page; equal sweeps give equal text.

    With `place`, the folder of the report, it has links to the files of jobs. `first` is a section
    to start with.
    """
    ranking = ranked(data)
    drawn = _drawn_models(ranking)
    table_px = _ROW_PX * min(len(data.rows), _MOST_ROWS) + 110.0
    grids = [
        _columns(_figures(ranking, model), 0.0 if index else table_px)
        for index, model in enumerate(drawn)
    ]
    if over_models := _figures_over_models(ranking):
        grids.append(_columns(over_models, 0.0))
    rest = len(ranking.models) - len(drawn)
    return (
        _templates()
        .get_template("report.html")
        .render(
            data=data,
            ranking=ranking,
            light=LIGHT,
            dark=DARK,
            facts=_facts(ranking),
            counts=counts_text(ranking),
            verdicts=[
                _ModelVerdict.of(ranking, model, place) for model in ranking.models[:_MODELS]
            ],
            more_models=_more_models(len(ranking.models) - _MODELS),
            first=Markup(first),
            settings=list(headings(ranking.keys).values()),
            rows=_table_rows(ranking, place),
            most_rows=_MOST_ROWS,
            notes=_mark_notes(ranking),
            grids=grids,
            table_beside=bool(drawn),
            not_drawn=_more_models(rest) if drawn else "",
            reasons=sweep_reasons(data),
            best_run=ranking.finished[0].row.run_id if ranking.finished else None,
        )
    )


def _more_models(count: int) -> str:
    return counted(count, "more model") if count > 0 else ""


def _facts(ranking: Ranking) -> str:
    data = ranking.data
    facts = [counted(len(data.rows), "job")]
    facts += [f"{k}={v}" for k, v in shared_settings(data, ranking.keys).items()]
    if data.started_ms is not None:
        started = datetime.fromtimestamp(data.started_ms / 1e3, UTC)
        facts.append(f"started {started:%Y-%m-%d %H:%M} UTC")
    return " · ".join(facts)


class _ModelVerdict(NamedTuple):
    """The summary of one model, at the top of the page."""

    name: str
    sentence: str
    links: list[_Link]
    instead: tuple[str, ...]

    @classmethod
    def of(cls, ranking: Ranking, model: str, place: Path | None) -> "_ModelVerdict":
        answer = verdict(ranking, model)
        name, sentence = ("Best:", f" {answer.sentence}")
        if len(ranking.models) > 1:
            name, sentence = model, f": {answer.sentence}"
        links = job_links(ranking.of_model(model)[0].row, place)
        instead = answer.instead if len(ranking.models) <= _INSTEAD else ()
        return cls(name, sentence, links, instead)


# The table: best jobs first for each model, those without a result last. It is readable without
# scripts; with them, a click on a heading sorts. Rows beyond a screen are behind a checkbox.


class _Number(NamedTuple):
    """A cell with a number."""

    text: str
    value: float | None
    """The value to sort by."""
    css: str = "n"
    title: str = ""

    @property
    def key(self) -> str:
        return "" if self.value is None else f"{self.value:.7g}"


class _TableRow(NamedTuple):
    css: str
    settings: list[str]
    numbers: list[_Number]
    run_id: str | None
    folder_name: str
    links: list[_Link]
    mark: str = ""
    mark_title: str = ""


def _table_rows(ranking: Ranking, place: Path | None) -> list[_TableRow]:
    shown = best_rows(ranking, _MOST_ROWS)
    visible = {id(row) for row in (*shown, *ranking.others[: _MOST_ROWS - len(shown)])}
    rows = []
    models = [row.model for row in ranking.finished]
    is_next = [False, *(before != after for before, after in pairwise(models))]
    for ranked_row, begins_model in zip(ranking.finished, is_next, strict=False):
        css = ["best"] * ranked_row.best + ["next"] * begins_model
        css += ["more"] * (id(ranked_row) not in visible)
        numbers = [
            _Number(measure.text(ranked_row.row), measure.value(ranked_row.row))
            for measure in ranking.measures
        ]
        row = _table_row(ranking, ranked_row.row, place, numbers, css)
        mark, mark_title = _MARKS[ranked_row.mark]
        rows.append(row._replace(mark=mark, mark_title=mark_title))
    for other in ranking.others:
        css = ["none", other.status] + ["more"] * (id(other) not in visible)
        numbers = [_Number(status_word(other), None, "n status", (other.error or "")[:300])]
        numbers += [_Number("-", None)] * (len(ranking.measures) - 1)
        rows.append(_table_row(ranking, other, place, numbers, css))
    return rows


def _table_row(
    ranking: Ranking,
    row: SweepRow,
    place: Path | None,
    numbers: list[_Number],
    css: Sequence[str],
) -> _TableRow:
    settings = [cell(row, key) for key in ranking.keys]
    folder_name = (row.folder or "").rpartition("/")[2]
    # A row has room for one link, to the job's folder with all files.
    links = job_links(row, place)[:1]
    return _TableRow(" ".join(css), settings, numbers, row.run_id, folder_name, links)


def _mark_notes(ranking: Ranking) -> str:
    notes = f"★ best, ◆ Pareto-optimal: no other is as good in {traded(ranking)} and devices used"
    if any(row.mark == "equal" for row in ranking.finished):
        notes += ", = costs the same as one above"
    return notes


def job_links(row: SweepRow, place: Path | None) -> list[_Link]:
    """Return links to the job's folder and to its existing figures.

    Addresses are relative to the folder `place`, so that both can be moved together. Without it
    there are no links.
    """
    if place is None or row.folder is None or not (folder := Path(row.folder)).is_dir():
        return []
    # Without the slash, links in the folder's page would be relative to its parent.
    links = [(f"{_address(folder, place)}/", "files")]
    figures = ((folder / name, label) for name, label in _SHOWN_FILES.items())
    return links + [(_address(path, place), label) for path, label in figures if path.is_file()]


def _address(path: Path, place: Path) -> str:
    relative = Path(os.path.relpath(path.resolve(), place.resolve())).as_posix()
    # Without ./, a first part with a colon would be read as a URL scheme.
    return f"./{quote(relative)}"


# The figures.


class _Figure(NamedTuple):
    title: str
    svg: Markup
    note: str = ""

    @property
    def height_px(self) -> float:
        height = re.search(r'<svg [^>]*?height="([\d.]+)"', self.svg)
        return (float(height[1]) if height else 0.0) + _CARD_PX


def _drawn_models(ranking: Ranking) -> tuple[str, ...]:
    """Return the models with figures: of several models, those with jobs to compare."""
    if len(ranking.models) == 1:
        return ranking.models
    return tuple(model for model in ranking.models if len(ranking.of_model(model)) > 1)[:_MODELS]


def _figures(ranking: Ranking, model: str) -> list[_Figure]:
    """Return the figures of one model: trade-off, heat map, and one per parameter that varies."""
    several = len(ranking.models) > 1
    time, of_model = ranking.by.name.capitalize(), f", {model}" if several else ""
    against = "memory" if ranking.against is ranking.memory else ranking.against.name
    own_keys = [key for key in ranking.keys if key not in (PLAN, *ranking.model_keys)]
    pareto = Markup(pareto_figure(ranking, model))
    figures = [_Figure(f"{time} against {against}{of_model}", pareto)]
    if keys := heat_map_keys(ranking):
        rest = [key for key in own_keys if key not in keys]
        note = f"the best over {', '.join(rest)}" if rest else ""
        name = f"{time} by {keys[0]} and {keys[1]}{of_model}"
        figures.append(_Figure(name, Markup(heat_map_svg(ranking, model, keys)), note))
    rows = [row for row in ranking.data.rows if not several or ranking.model_of(row) == model]
    for key in own_keys:
        if len({cell(row, key) for row in rows}) > 1:
            svg = Markup(parameter_figure(ranking, model, key))
            figures.append(_Figure(f"{time} by {key}{of_model}", svg))
    return [figure for figure in figures if figure.svg]


def _figures_over_models(ranking: Ranking) -> list[_Figure]:
    """Return a figure for each parameter that defines the model, such as the number of layers."""
    time = ranking.by.name.capitalize()
    figures = [
        _Figure(f"{time} by {key}", Markup(parameter_figure(ranking, None, key)))
        for key in ranking.model_keys
    ]
    return [figure for figure in figures if figure.svg]


def _columns(figures: Sequence[_Figure], left_px: float) -> tuple[list[_Figure], list[_Figure]]:
    """Return the figures in two columns, adding each to the shorter one.

    `left_px` is the height of the content above the first column.
    """
    columns: tuple[list[_Figure], list[_Figure]] = ([], [])
    heights = [left_px, 0.0]
    for figure in figures:
        index = 0 if heights[0] < heights[1] or (not left_px and heights[0] == heights[1]) else 1
        columns[index].append(figure)
        heights[index] += figure.height_px
    return columns


# Two sweeps, job by job.


def comparison_html(comparison: Comparison, named: str) -> str:
    """Return a section with all pairs, largest change first, and the jobs in only one sweep.

    `named` describes the sweep to compare with. A click on a heading sorts.
    """
    measures = (comparison.time, comparison.memory)
    lines, only = best_lines(comparison), only_lines(comparison)
    if same := comparison.same_runs:
        lines.insert(0, f"{counted(same, 'job')}: one run that both sweeps have")
    return (
        _templates()
        .get_template("comparison.html")
        .render(
            named=named,
            title=title(comparison),
            settings=list(headings(comparison.keys).values()),
            costs=[
                (m.name, (f"before, {m.unit}", f"after, {m.unit}", "change, %")) for m in measures
            ],
            rows=[_pair_row(comparison, pair) for pair in comparison.pairs],
            why_none=why_none(comparison),
            lines=lines,
            only=only,
            only_words=f"{counted(len(only), 'job')} in one of the two alone",
            most_open=_OPEN,
        )
    )


def _pair_row(comparison: Comparison, pair: Pair) -> dict[str, list[str] | list[_Number]]:
    numbers = []
    for measure in (comparison.time, comparison.memory):
        for row in (pair.before, pair.after):
            value = measure.value(row) if finished(row) else None
            numbers.append(_Number(cost_text(row, measure), value))
        numbers.append(_change(pair, measure))
    return {"settings": [cell(pair.after, key) for key in comparison.keys], "numbers": numbers}


def _change(pair: Pair, measure: Measure) -> _Number:
    change = change_pct(pair, measure)
    if change is None or math.isinf(change) or change == 0:
        value = None if change is None or math.isinf(change) else change
        return _Number(change_text(pair, measure), value)
    is_better = (change > 0) == (measure.metric.better == "higher")
    return _Number(change_text(pair, measure), change, "n better" if is_better else "n worse")
