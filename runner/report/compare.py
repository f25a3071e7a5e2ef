"""Compare two sweeps job by job: the costs before and after."""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from runner.output.terminal import counted
from runner.report.findings import settings_text, status_word
from runner.report.ranking import Measure, against_of, finished, measures_of
from runner.report.sweep_data import (
    CHOICES,
    PLAN,
    SweepData,
    SweepRow,
    chosen_by_plans,
    in_order,
    model_keys,
    model_label,
    models_first,
    typed_settings,
    varied,
)

__all__ = [
    "Comparison",
    "Difference",
    "Pair",
    "best_lines",
    "change_pct",
    "change_text",
    "compared",
    "cost_text",
    "only_lines",
    "title",
    "unlike",
    "why_none",
]

_MODELS = 8
"""Most models whose best jobs are listed."""


@dataclass(frozen=True, slots=True)
class Difference:
    """A setting with one value in all jobs before, and another in all jobs after."""

    key: str
    before: str
    after: str


@dataclass(frozen=True, slots=True)
class Pair:
    """A job in both sweeps."""

    before: SweepRow
    after: SweepRow


@dataclass(frozen=True, slots=True)
class Comparison:
    """The outcomes of the same jobs in two sweeps."""

    before: SweepData
    after: SweepData
    differences: tuple[Difference, ...]
    """Settings that differ between the sweeps as a whole, ignored in matching jobs."""
    keys: tuple[str, ...]
    """Settings in which the jobs of a sweep differ, those that define the model first."""
    time: Measure
    """The measure that jobs are ranked by."""
    memory: Measure
    """Peak memory, or latency if they are ranked by memory."""
    pairs: tuple[Pair, ...]
    """Pairs that fit in only one of the sweeps first, then by largest change."""
    only_before: tuple[SweepRow, ...]
    only_after: tuple[SweepRow, ...]

    @property
    def model_keys(self) -> tuple[str, ...]:
        """The `keys` that define the model."""
        return model_keys(self.keys)

    @property
    def same_runs(self) -> int:
        """Number of pairs that are a single run in both sweeps."""
        return sum(1 for p in self.pairs if p.before.run_id and p.before.run_id == p.after.run_id)

    def model_of(self, row: SweepRow) -> str:
        """Return the model of `row`; empty if all jobs have the same."""
        return model_label(row, self.model_keys) if self.model_keys else ""

    def best(self, data: SweepData) -> dict[str, SweepRow]:
        """Return the best job of each model in `data`, one of the two sweeps."""
        best: dict[str, SweepRow] = {}
        for row in filter(finished, data.rows):
            name = self.model_of(row)
            if name not in best or self._time(row) < self._time(best[name]):
                best[name] = row
        return best

    def _time(self, row: SweepRow) -> float:
        value = self.time.value(row)
        return math.inf if value is None else value


def compared(before: SweepData, after: SweepData) -> Comparison:
    """Compare the jobs of `after` with those of `before`.

    Jobs are matched by all settings except those that differ between the sweeps as a whole, and
    those of plans that were chosen for them. Jobs of a sweep with equal settings are matched in
    order.
    """
    rows = (*before.rows, *after.rows)
    chosen = chosen_by_plans(before) | chosen_by_plans(after)
    aside = _apart(before.rows, after.rows) - chosen
    matched_by = sorted({key for row in rows for key in row.settings} - aside - chosen)
    pairs, only_before, only_after = _matched(before.rows, after.rows, matched_by)
    measures = measures_of(rows)
    time, memory = measures[0], against_of(measures)
    swept = tuple(dict.fromkeys((*after.swept, *before.swept)))
    together = replace(after, rows=rows, swept=swept)
    return Comparison(
        before=before,
        after=after,
        differences=(
            *_differences(before.rows, after.rows, aside),
            *_asked_otherwise(before, after, chosen),
        ),
        keys=models_first(
            tuple(key for key in varied(together) if key not in aside | chosen - {PLAN})
        ),
        time=time,
        memory=memory,
        pairs=tuple(sorted(pairs, key=lambda pair: _order(pair, time, memory))),
        only_before=only_before,
        only_after=only_after,
    )


def change_pct(pair: Pair, measure: Measure) -> float | None:
    """Return the growth of a pair's measure in %, infinite from 0; None unless both have it."""
    if not (finished(pair.before) and finished(pair.after)):
        return None
    before, after = measure.value(pair.before), measure.value(pair.after)
    if before is None or after is None:
        return None
    if before == after:
        return 0.0
    return (after / before - 1) * 100 if before else math.inf


def unlike(comparison: Comparison) -> list[Difference]:
    """Return the settings without a common value in the two sweeps, so that no job is in both."""
    before, after = _values(comparison.before.rows), _values(comparison.after.rows)
    return [
        Difference(key, _listed(before[key]), _listed(after[key]))
        for key in comparison.keys
        if key != PLAN and not before[key] & after[key]
    ]


def _listed(values: set[str]) -> str:
    return ",".join(in_order(dict.fromkeys(values))) if values else "not set"


def _values(rows: Sequence[SweepRow]) -> defaultdict[str, set[str]]:
    """Return the values of each setting; none for an unknown one."""
    values: defaultdict[str, set[str]] = defaultdict(set)
    for row in rows:
        for key, text in row.settings.items():
            values[key].add(text)
    return values


def _apart(before: Sequence[SweepRow], after: Sequence[SweepRow]) -> set[str]:
    """Return the settings with at most one value in each sweep, and different ones.

    They include options that only one of the sweeps has.
    """
    old, new = _values(before), _values(after)
    return {
        key
        for key in {**old, **new}
        if max(len(old[key]), len(new[key])) <= 1 and old[key] != new[key]
    }


def _differences(
    before: Sequence[SweepRow], after: Sequence[SweepRow], aside: set[str]
) -> tuple[Difference, ...]:
    """Return the differences in the keys `aside`, without those that follow from another key."""
    differences = []
    for key in dict.fromkeys(key for row in (*before, *after) for key in row.settings):
        if key not in aside or ("." in key and key.partition(".")[0] in aside):
            continue
        old, new = ({row.settings.get(key) for row in rows} for rows in (before, after))
        # A setting that only some jobs of a sweep have follows from another, such as the mode.
        if len(old) == 1 and len(new) == 1:
            differences.append(Difference(key, old.pop() or "not set", new.pop() or "not set"))
    return tuple(differences)


def _asked_otherwise(
    before: SweepData, after: SweepData, chosen: set[str]
) -> tuple[Difference, ...]:
    """Return the settings in `chosen` by plans that the two commands give other values."""
    old, new = typed_settings(before), typed_settings(after)
    return tuple(
        Difference(key, old.get(key, "not set"), new.get(key, "not set"))
        for key in sorted(chosen & (old.keys() | new.keys()))
        if old.get(key) != new.get(key)
    )


def _matched(
    before: Sequence[SweepRow], after: Sequence[SweepRow], keys: Sequence[str]
) -> tuple[list[Pair], tuple[SweepRow, ...], tuple[SweepRow, ...]]:
    """Return the pairs, and the jobs in only one of the sweeps."""

    def identity(row: SweepRow) -> tuple[str | None, ...]:
        return tuple(row.settings.get(key) for key in keys)

    unmatched: dict[tuple[str | None, ...], list[SweepRow]] = defaultdict(list)
    for row in before:
        unmatched[identity(row)].append(row)
    pairs, new = [], []
    for row in after:
        candidates = unmatched[identity(row)]
        if candidates:
            pairs.append(_pair(candidates.pop(0), row))
        else:
            new.append(row)
    return pairs, tuple(row for rows in unmatched.values() for row in rows), tuple(new)


def _pair(before: SweepRow, after: SweepRow) -> Pair:
    """Return the pair; if their plans differ, the setting of `after` shows both."""
    plans = [row.settings.get(PLAN) for row in (before, after)]
    if None not in plans and plans[0] != plans[1]:
        after = replace(after, settings={**after.settings, PLAN: " -> ".join(map(str, plans))})
    return Pair(before, after)


def _order(pair: Pair, time: Measure, memory: Measure) -> tuple[int, float]:
    results = finished(pair.before) + finished(pair.after)
    changes = [change_pct(pair, measure) for measure in (time, memory)]
    largest = max((abs(change) for change in changes if change is not None), default=0.0)
    return {1: 0, 2: 1, 0: 2}[results], -largest


# Lines around the table of a comparison, in the terminal and in the report.


def title(comparison: Comparison) -> str:
    """Return the number of jobs in both sweeps, their shared choices, and overall differences."""
    aside = {difference.key for difference in comparison.differences}
    rows = comparison.after.rows or comparison.before.rows
    shared = [
        f"{key}={rows[0].settings[key]}"
        for key in CHOICES
        if rows and key in rows[0].settings and key not in aside and key not in comparison.keys
    ]
    differ = [f"{d.key}={d.before} before and {d.after} after" for d in comparison.differences]
    return ", ".join([f"{counted(len(comparison.pairs), 'job')} in both", *shared, *differ])


def cost_text(row: SweepRow, measure: Measure) -> str:
    """Return a measure of a job as text, or its status if it has no result."""
    return measure.text(row) if finished(row) else status_word(row)


def change_text(pair: Pair, measure: Measure) -> str:
    """Return the growth of a pair's measure in % as text; ``-`` if undefined."""
    change = change_pct(pair, measure)
    if change is None or math.isinf(change):
        return "-"
    # Do not show a small change as zero.
    return "0.0" if change == 0 else f"{change:+,.1f}" if abs(change) >= 0.05 else f"{change:+.1g}"


def best_lines(comparison: Comparison) -> list[str]:
    """Return lines on the best job before and after, one for each of the first models."""
    before, after = (comparison.best(d) for d in (comparison.before, comparison.after))
    models = list(dict.fromkeys((*before, *after)))
    lines = []
    for model in models[:_MODELS]:
        old, new = before.get(model), after.get(model)
        sides = f"before {_named(comparison, old)}; after {_named(comparison, new)}"
        change = change_text(Pair(old, new), comparison.time) if old and new else "-"
        grew = f" ({change} %)" if change != "-" else ""
        lines.append(f"best{f' of {model}' if model else ''}: {sides}{grew}")
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


def only_lines(comparison: Comparison, max_lines: int | None = None) -> list[str]:
    """Return a line per job in only one of the sweeps, at most `max_lines` for each sweep."""
    lines = []
    for side, rows in (("before", comparison.only_before), ("after", comparison.only_after)):
        for row in rows[:max_lines]:
            cost = cost_text(row, comparison.time)
            unit = f" {comparison.time.unit}" if finished(row) else ""
            named = settings_text([row], comparison.keys) or row.name
            lines.append(f"only {side}: {named}, {cost}{unit}")
        if max_lines is not None and len(rows) > max_lines:
            lines.append(f"only {side}: {len(rows) - max_lines} more; the report has all")
    return lines


def why_none(comparison: Comparison) -> str:
    """Return why no job is in both sweeps; empty if one is."""
    if comparison.pairs:
        return ""
    differ = [f"{d.key}={d.before} before, {d.after} after" for d in unlike(comparison)]
    return f"no job is in both: {'; '.join(differ) or 'their settings differ in turn'}"
