"""The report of a sweep: one HTML file that needs no network, no script and no other file."""

import re
from collections.abc import Sequence
from datetime import UTC, datetime
from html import escape
from pathlib import Path

from runner.output.terminal import counted
from runner.report.heat_map import heat_map_keys, heat_map_svg
from runner.report.html_table import MOST_ROWS, links_html, table_html
from runner.report.page_style import CSS, SCRIPT
from runner.report.parameter_plot import parameter_figure
from runner.report.pareto_plot import pareto_figure
from runner.report.ranking import Ranking, ranked
from runner.report.reasons import sweep_reasons
from runner.report.rows import SweepData
from runner.report.settings import cell, shared_settings
from runner.report.verdict import counts_text, verdict

__all__ = ["report_html"]

_ROW_PX, _CARD_PX = 27.0, 66.0
"""About how high a row of the table is, and what surrounds a figure."""
_INSTEAD = 3
"""Models of which more than the best is said."""
_MODELS = 8
"""Models that get a sentence, and figures; of more the table is enough."""
# No request can leave the page, whatever a name in it says.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"


def report_html(data: SweepData, place: Path | None = None, *, first: str = "") -> str:
    """Return the report as a whole page; equal sweeps give equal text.

    With the folder `place`, where the report is to be, the table has links to the files of the
    jobs. `first` is a section to begin with.
    """
    ranking = ranked(data)
    drawn = _drawn(ranking)
    parts = [
        _header(ranking, place),
        first,
        _first_look(ranking, drawn[:1], place),
        *(_figures(ranking, model) for model in drawn[1:]),
        _of_all_models(ranking),
        _left_out(ranking, drawn),
        _reasons(ranking),
        _repeat(ranking),
    ]
    title = escape(data.title)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f'<title>{title}</title><link rel="icon" href="data:,"><style>{CSS}</style></head>\n'
        f"<body><main>\n{''.join(part for part in parts if part)}</main>"
        f"<script>{SCRIPT}</script></body></html>\n"
    )


def _header(ranking: Ranking, place: Path | None) -> str:
    data = ranking.data
    facts = [counted(len(data.rows), "job")]
    facts += [f"{k}={v}" for k, v in shared_settings(data, ranking.keys).items()]
    if data.started_ms is not None:
        started = datetime.fromtimestamp(data.started_ms / 1e3, UTC)
        facts.append(f"started {started:%Y-%m-%d %H:%M} UTC")
    asked = f'<p class="question">{escape(data.question)}</p>' if data.question else ""
    counts = "".join(
        f'<li class="{status}">{escape(words)}</li>' for status, words in counts_text(ranking)
    )
    return (
        f"<header><h1>{escape(data.title)}</h1><p>{escape(' · '.join(facts))}</p>{asked}"
        f'<ul class="counts">{counts}</ul></header>\n{_verdicts(ranking, place)}'
    )


def _verdicts(ranking: Ranking, place: Path | None) -> str:
    if not ranking.finished:
        words = "No job has a result yet." if ranking.count("running") else "No job has a result."
        return f'<div class="verdict"><p>{words}</p></div>\n'
    several = len(ranking.models) > 1
    blocks = []
    for model in ranking.models[:_MODELS]:
        found = verdict(ranking, model)
        name = f"<strong>{escape(model)}</strong>: " if several else "<strong>Best:</strong> "
        instead = found.instead if len(ranking.models) <= _INSTEAD else ()
        lines = "".join(f"<li>{escape(line)}</li>" for line in instead)
        items = f"<ul>{lines}</ul>" if lines else ""
        links = links_html(ranking.of_model(model)[0].row, place)
        leads = f" {links}" if links else ""
        blocks.append(f"<p>{name}{escape(found.sentence)}{leads}</p>{items}")
    if (rest := len(ranking.models) - _MODELS) > 0:
        blocks.append(f"<p>… and {counted(rest, 'more model')} in the table</p>")
    return f'<div class="verdict">{"".join(blocks)}</div>\n'


def _drawn(ranking: Ranking) -> tuple[str, ...]:
    """Return the models that get figures: of several those with jobs to compare."""
    if len(ranking.models) == 1:
        return ranking.models
    return tuple(model for model in ranking.models if len(ranking.of_model(model)) > 1)[:_MODELS]


def _first_look(ranking: Ranking, models: Sequence[str], place: Path | None) -> str:
    """Return the table beside the figures of the only one of `models`, if there is one."""
    least = f"by {ranking.by.name}, least first"
    notes = "★ best, ◆ Pareto-optimal: no other is as good in time, peak memory and devices used"
    if any(row.mark == "equal" for row in ranking.finished):
        notes += ", = costs the same as one above"
    table = (
        f'<section class="long"><h2>Ranking <small class="muted">{least}</small></h2>'
        f'{table_html(ranking, place)}<p class="muted">{notes}</p></section>'
    )
    if not models:
        return f"{table}\n"
    model = models[0]
    rows = min(len(ranking.data.rows), MOST_ROWS)
    beside = [_pareto(ranking, model), _heat_map(ranking, model), *_parameters(ranking, model)]
    return _two_columns([table], beside, _ROW_PX * rows + 110.0)


def _pareto(ranking: Ranking, model: str) -> str:
    title = f"{ranking.by.name.capitalize()} against memory{_of(ranking, model)}"
    return _figure(title, pareto_figure(ranking, model))


def _of(ranking: Ranking, model: str) -> str:
    return f", {model}" if len(ranking.models) > 1 else ""


def _figure(title: str, svg: str, note: str = "") -> str:
    if not svg:
        return ""
    said = f'<p class="muted">{escape(note)}</p>' if note else ""
    return f"<section><h2>{escape(title)}</h2><figure>{svg}</figure>{said}</section>"


def _heat_map(ranking: Ranking, model: str) -> str:
    keys = heat_map_keys(ranking)
    if keys is None:
        return ""
    rest = [key for key in ranking.keys if key not in (*keys, *ranking.model_keys)]
    note = f"the best over {', '.join(rest)}" if rest else ""
    title = f"{ranking.by.name.capitalize()} by {keys[0]} and {keys[1]}{_of(ranking, model)}"
    return _figure(title, heat_map_svg(ranking, model, keys), note)


def _figures(ranking: Ranking, model: str) -> str:
    """Return the figures of a model that is not the first, whose figures are beside the table."""
    parts = [_pareto(ranking, model), _heat_map(ranking, model), *_parameters(ranking, model)]
    return _two_columns([], parts, 0.0)


def _parameters(ranking: Ranking, model: str) -> list[str]:
    """Return the figure of each parameter that varies for the model."""
    several = len(ranking.models) > 1
    rows = [r for r in ranking.data.rows if not several or ranking.model_of(r) == model]
    own = [key for key in ranking.keys if key not in ranking.model_keys]
    keys = [key for key in own if len({cell(row, key) for row in rows}) > 1]
    title = ranking.by.name.capitalize()
    return [
        _figure(f"{title} by {key}{_of(ranking, model)}", parameter_figure(ranking, model, key))
        for key in keys
    ]


def _of_all_models(ranking: Ranking) -> str:
    """Return a figure for each parameter that makes another model, such as the number of layers."""
    title = ranking.by.name.capitalize()
    figures = [
        _figure(f"{title} by {key}", parameter_figure(ranking, None, key))
        for key in ranking.model_keys
    ]
    return _two_columns([], figures, 0.0) if any(figures) else ""


def _two_columns(left: list[str], figures: list[str], left_px: float) -> str:
    """Return the figures in two columns, each in the one that is shorter so far.

    `left` is what the first column begins with, `left_px` about how high that is.
    """
    columns, heights = [list(left), []], [left_px, 0.0]
    for figure in figures:
        if figure:
            index = 0 if heights[0] < heights[1] or (not left and heights[0] == heights[1]) else 1
            columns[index].append(figure)
            heights[index] += _height_px(figure)
    both = "".join(f"<div>{''.join(column)}</div>" for column in columns)
    return f'<div class="grid">{both}</div>\n'


def _height_px(figure: str) -> float:
    found = re.search(r'<svg [^>]*?height="([\d.]+)"', figure)
    return (float(found[1]) if found else 0.0) + _CARD_PX


def _left_out(ranking: Ranking, drawn: Sequence[str]) -> str:
    rest = len(ranking.models) - len(drawn)
    if rest <= 0 or not drawn:
        return ""
    return f'<p class="muted">{counted(rest, "more model")} in the table, without figures</p>\n'


def _reasons(ranking: Ranking) -> str:
    lines = sweep_reasons(ranking.data)
    if not lines:
        return ""
    items = "".join(f"<li>{escape(line)}</li>" for line in lines)
    return f'<section><h2>Without a result</h2><ul class="reasons">{items}</ul></section>\n'


def _repeat(ranking: Ranking) -> str:
    parts = []
    if ranking.data.command:
        parts.append(
            f"<p>The sweep; what is there already is not run again:</p>"
            f"<pre>{escape(ranking.data.command)}</pre>"
        )
    best = ranking.finished[0].row.run_id if ranking.finished else None
    if best:
        named = "first" if len(ranking.models) > 1 else "best"
        parts.append(
            f"<p>One run, here the {named}, by its id in the last column:</p>"
            f"<pre>python -m runner rerun={escape(best)}</pre>"
        )
    return f"<section><h2>Repeat</h2>{''.join(parts)}</section>\n" if parts else ""
