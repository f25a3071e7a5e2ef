"""What a comparison of two sweeps says beside its table, in the terminal and in the report."""

import math

from runner.report.compare import Comparison, Pair, change_pct, unlike
from runner.report.measures import Measure, finished
from runner.report.reasons import STATUS_WORDS, settings_text
from runner.report.rows import SweepRow
from runner.report.settings import CHOICES
from runner.terminal import counted

__all__ = ["best_lines", "change_text", "cost_text", "only_lines", "title", "why_none"]

_MODELS = 8
"""Models of which the best jobs are named."""


def title(comparison: Comparison) -> str:
    """Return how many jobs are in both, what they share, and what differs as a whole."""
    aside = {difference.key for difference in comparison.differences}
    rows = comparison.after.rows or comparison.before.rows
    shared = [
        f"{key}={rows[0].settings[key]}"
        for key in CHOICES
        if rows and key in rows[0].settings and key not in aside and key not in comparison.keys
    ]
    apart = [f"{d.key}={d.before} before and {d.after} after" for d in comparison.differences]
    return ", ".join([f"{counted(len(comparison.pairs), 'job')} in both", *shared, *apart])


def cost_text(row: SweepRow, measure: Measure) -> str:
    """Return a number of a job, or why there is none."""
    return measure.text(row) if finished(row) else STATUS_WORDS.get(row.status, "failed")


def change_text(pair: Pair, measure: Measure) -> str:
    """Return by how many % a number of a pair grew, ``-`` where that says nothing."""
    change = change_pct(pair, measure)
    if change is None or math.isinf(change):
        return "-"
    # A change too small for a digit is none of zero.
    return "0.0" if change == 0 else f"{change:+,.1f}" if abs(change) >= 0.05 else f"{change:+.1g}"


def best_lines(comparison: Comparison) -> list[str]:
    """Return the best job before and after, a line for each model of at most some."""
    before, after = (comparison.best(d) for d in (comparison.before, comparison.after))
    models = list(dict.fromkeys((*before, *after)))
    lines = []
    for model in models[:_MODELS]:
        ours, theirs = before.get(model), after.get(model)
        said = [f"before {_named(comparison, ours)}", f"after {_named(comparison, theirs)}"]
        change = change_text(Pair(ours, theirs), comparison.time) if ours and theirs else "-"
        grew = f" ({change} %)" if change != "-" else ""
        lines.append(f"best{f' of {model}' if model else ''}: {'; '.join(said)}{grew}")
    if len(models) > _MODELS:
        lines.append(f"… and {counted(len(models) - _MODELS, 'more model')}")
    return lines


def _named(comparison: Comparison, row: SweepRow | None) -> str:
    if row is None:
        return "none"
    costs = [
        f"{measure.text(row)} {measure.unit}" for measure in (comparison.time, comparison.memory)
    ]
    model = comparison.model_keys
    named = settings_text([row], [key for key in comparison.keys if key not in model])
    return f"{named or row.name}, {', '.join(costs)}"


def only_lines(comparison: Comparison, most: int | None = None) -> list[str]:
    """Return a line for each job that is in one of the two alone, of each at most `most`."""
    lines = []
    sides = (("before", comparison.only_before), ("after", comparison.only_after))
    for side, rows in sides:
        for row in rows[:most]:
            cost = cost_text(row, comparison.time)
            unit = f" {comparison.time.unit}" if finished(row) else ""
            named = settings_text([row], comparison.keys) or row.name
            lines.append(f"only {side}: {named}, {cost}{unit}")
        if most is not None and len(rows) > most:
            lines.append(f"only {side}: {len(rows) - most} more; the report has all")
    return lines


def why_none(comparison: Comparison) -> str:
    """Return why no job is in both; empty when one is."""
    if comparison.pairs:
        return ""
    found = [f"{d.key}={d.before} before, {d.after} after" for d in unlike(comparison)]
    return f"no job is in both: {'; '.join(found) or 'their settings differ in turn'}"
