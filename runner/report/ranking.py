"""Rank the jobs of a sweep, and choose the metrics to show.

The best job comes first, and Pareto-optimal jobs are marked.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from runner.output.metrics import BY_NAME, BY_OBJECTIVE, METRICS, Metric
from runner.report.sweep_data import (
    SweepData,
    SweepRow,
    cell,
    model_keys,
    model_label,
    model_order,
    models_first,
    varied,
    with_effective_batch,
)

__all__ = [
    "Measure",
    "RankedRow",
    "Ranking",
    "against_of",
    "best_rows",
    "finished",
    "frontier",
    "measures_of",
    "memory_of",
    "number",
    "ranked",
]


# Measures to compare jobs by.


@dataclass(frozen=True, slots=True)
class Measure:
    """A metric in a unit that suits a report."""

    metric: Metric
    unit: str
    """The metric's unit, or a smaller one for small numbers."""
    scale: float = 1.0
    """Factor from the metric's unit to `unit`."""

    @property
    def key(self) -> str:
        """The name of the metric."""
        return self.metric.name

    @property
    def name(self) -> str:
        """Its heading in reports."""
        return self.metric.heading

    @property
    def label(self) -> str:
        """Name and unit, such as ``latency, ms``."""
        return f"{self.name}, {self.unit}" if self.unit else self.name

    def value(self, row: SweepRow) -> float | None:
        """Return the value of `row` in this unit, or None."""
        value = number(row, self.key)
        return None if value is None else value * self.scale

    def text(self, row: SweepRow) -> str:
        """Return the value of `row` as text; ``-`` for none."""
        value = self.value(row)
        return "-" if value is None else format(value, self.metric.format)


_SMALLER = {
    "ms": (("us", 1e3), ("ns", 1e6)),
    "GiB": (("MiB", 2.0**10), ("KiB", 2.0**20)),
}
"""Smaller units, with their number per unit."""
_LEAST = 0.1
"""A column with a smaller maximum has too few digits and gets a smaller unit."""
_SIZES = ("model.batch_size", "prompt_len", "output_len")
"""Settings that decide how much one run computes."""
_PEAKS = ("peak_memory_gib", "schedule_peak_gib")


def number(row: SweepRow, key: str) -> float | None:
    """Return the metric `key` of `row`, possibly derived from others; None if it has none."""
    derived = _DERIVED.get(key)
    return derived(row.metrics) if derived else row.metrics.get(key)


def _example_ms(metrics: Mapping[str, float]) -> float | None:
    # A latency of zero has an infinite rate, which is not logged.
    rate = metrics.get("examples_per_s", math.inf if "step_ms" in metrics else None)
    return 1e3 / rate if rate else None


def _token_ms(metrics: Mapping[str, float]) -> float | None:
    """Return the time in which all texts of a decode or a generation together gain one token."""
    rate = metrics.get("tokens_per_s")
    return 1e3 / rate if rate and "tpot_ms" in metrics else None


def _peak_gib(metrics: Mapping[str, float]) -> float | None:
    """Return the peak memory: of a schedule's step if there is one, not of one microbatch."""
    return metrics.get("schedule_peak_gib", metrics.get("peak_memory_gib"))


_DERIVED: dict[str, Callable[[Mapping[str, float]], float | None]] = {
    "example_ms": _example_ms,
    "token_ms": _token_ms,
    "peak_memory_gib": _peak_gib,
}


def finished(row: SweepRow) -> bool:
    """Return whether `row` has a result to compare."""
    return row.status == "finished" and row.metrics.get("latency_ms") is not None


def measures_of(rows: Sequence[SweepRow]) -> tuple[Measure, ...]:
    """Return the measures to show for `rows`, which are ranked by the first.

    If all jobs minimize the same objective, the first is its metric, followed by its gap. But if
    batch sizes or the lengths of generations differ, or some jobs have a schedule, latencies and
    loads are of one input or of one microbatch, and those of generations are of their last token.
    Then the first is the time per token, or per example where there are none: the inverse of the
    throughput.
    """
    finished_rows = [row for row in rows if finished(row)]
    with_schedule = [row for row in finished_rows if number(row, "step_ms") is not None]
    sizes = {tuple(map(row.settings.get, _SIZES)) for row in finished_rows}
    by_rate = with_schedule or len(sizes) > 1 or _all_generate(finished_rows)
    metrics = [
        metric for metric in METRICS if _has_column(metric, finished_rows, len(with_schedule))
    ]
    if by_rate:
        rates = ("token_ms", "example_ms")
        known = [key for key in rates if all(number(r, key) is not None for r in finished_rows)]
        metrics[:0] = [BY_NAME[key] for key in known[:1]]
    objective = _objective_of(finished_rows)
    if objective in ("memory", "energy") or not by_rate:
        metrics = _objective_first(metrics, finished_rows, objective)
    return tuple(_legible(metric, finished_rows) for metric in metrics)


def _all_generate(rows: Sequence[SweepRow]) -> bool:
    of_both = ("ttft_ms", "tpot_ms")
    return bool(rows) and all(number(row, key) is not None for row in rows for key in of_both)


def _objective_of(rows: Sequence[SweepRow]) -> str:
    """Return the objective of all `rows`; latency if they differ."""
    objectives = {row.settings.get("objective", "latency") for row in rows}
    return objectives.pop() if len(objectives) == 1 else "latency"


def _objective_first(
    metrics: Sequence[Metric], rows: Sequence[SweepRow], objective: str
) -> list[Metric]:
    """Return `metrics` with those of an objective other than latency first, if all rows have it."""
    key, gap = BY_OBJECTIVE[objective]
    if objective == "latency" or any(number(row, key) is None for row in rows):
        return list(metrics)
    has_gap = any(number(row, gap) is not None for row in rows)
    _, gap_of_latency = BY_OBJECTIVE["latency"]
    first = [BY_NAME[key], *([BY_NAME[gap]] if has_gap else [])]
    return [*first, *(m for m in metrics if m not in first and m.name != gap_of_latency)]


def _has_column(metric: Metric, finished_rows: Sequence[SweepRow], with_schedule: int) -> bool:
    values = {number(row, metric.name) for row in finished_rows}
    scheduled = 0 < with_schedule == len(finished_rows)
    return {
        "": False,
        "always": True,
        "plain": not with_schedule,
        "bounded": not with_schedule and bool(values - {None}),
        "mixed": not scheduled,
        "scheduled": scheduled,
        "differs": len(values) > 1,
        "some": bool(values - {None}),
        "trained": any(number(row, "gradients_gib") is not None for row in finished_rows),
        "tokens": _counts_tokens(finished_rows),
    }[metric.column]


def _counts_tokens(finished_rows: Sequence[SweepRow]) -> bool:
    """Return whether to show tokens: for decodes, and if sequence lengths differ."""
    if any(number(row, "tpot_ms") is not None for row in finished_rows):
        return True
    return len({row.settings.get("model.seq_len") for row in finished_rows}) > 1


def _legible(metric: Metric, rows: Sequence[SweepRow]) -> Measure:
    """Return `metric` in a unit in which its values have enough digits."""
    values = [value for row in rows if (value := number(row, metric.name)) is not None]
    largest, measure = max(values, default=0.0), Measure(metric, metric.unit)
    for unit, scale in _SMALLER.get(metric.unit, ()):
        if 0 < largest * measure.scale < _LEAST:
            measure = replace(measure, unit=unit, scale=scale)
    return measure


def memory_of(measures: Sequence[Measure]) -> Measure:
    """Return the measure of peak memory, which `measures_of` always includes."""
    return next(measure for measure in measures if measure.key in _PEAKS)


_TIMES = ("latency_ms", "token_ms", "example_ms", "step_ms")


def against_of(measures: Sequence[Measure]) -> Measure:
    """Return the measure to weigh against the first: peak memory, or a time if that is first."""
    memory = memory_of(measures)
    if memory is not measures[0]:
        return memory
    by_key = {measure.key: measure for measure in measures}
    times = (by_key[key] for key in _TIMES if key in by_key)
    return next(times, memory)


# The Pareto frontier.


def frontier(points: Sequence[tuple[float, ...]]) -> list[bool]:
    """Return whether each point is Pareto-optimal, with less being better in each coordinate.

    A point is optimal if no other is at least as good in all coordinates and better in one, so
    equal points are optimal together. Takes O(points x points on the frontier) time.
    """
    optimal = [False] * len(points)
    front: list[tuple[float, ...]] = []
    # In lexicographic order, dominating points come first; by transitivity, comparing with the
    # frontier is enough.
    for index in sorted(range(len(points)), key=points.__getitem__):
        point = points[index]
        if not any(_dominates(other, point) for other in front):
            optimal[index] = True
            if not front or front[-1] != point:
                front.append(point)
    return optimal


def _dominates(better: tuple[float, ...], worse: tuple[float, ...]) -> bool:
    return better != worse and all(b <= w for b, w in zip(better, worse, strict=True))


# The ranking.

Mark = Literal["best", "pareto", "equal", ""]


@dataclass(frozen=True, slots=True)
class RankedRow:
    """A job, compared with the others of its model."""

    row: SweepRow
    model: str
    """The model, with its settings that vary: see `Ranking.model_keys`."""
    best: bool
    """Whether no job of its model has a better time; ties are best together."""
    pareto: bool
    """Whether it is Pareto-optimal for its model in the measure that jobs are ranked by, the one
    against it, and devices."""
    repeats: bool = False
    """Whether an earlier job of its model has the same such costs."""
    leads: bool = False
    """Whether it is the first of its model."""

    @property
    def mark(self) -> Mark:
        """Its mark in tables; of ties, only the first is marked as best or Pareto-optimal."""
        if self.repeats and (self.best or self.pareto):
            return "equal"
        return "best" if self.leads else "pareto" if self.pareto else ""


@dataclass(frozen=True, slots=True)
class Ranking:
    """A sweep's jobs in order, with the settings and measures to show."""

    data: SweepData
    keys: tuple[str, ...]
    """Settings in which the jobs differ, those that define the model first."""
    measures: tuple[Measure, ...]
    """Measures to show; the jobs are ranked by the first."""
    finished: tuple[RankedRow, ...]
    """Jobs with a result, by model, then best first."""
    others: tuple[SweepRow, ...]
    """Jobs without a result, in the order of the sweep."""

    @property
    def by(self) -> Measure:
        """The measure that jobs are ranked by."""
        return self.measures[0]

    @property
    def memory(self) -> Measure:
        """Peak memory of the fullest device."""
        return memory_of(self.measures)

    @property
    def against(self) -> Measure:
        """The measure to weigh against the first: peak memory, or latency if ranked by memory."""
        return against_of(self.measures)

    @property
    def model_keys(self) -> tuple[str, ...]:
        """The `keys` that define the model; only jobs with equal ones are compared."""
        return model_keys(self.keys)

    @property
    def models(self) -> tuple[str, ...]:
        """All models with a result, in the order of the ranking."""
        return tuple(dict.fromkeys(ranked_row.model for ranked_row in self.finished))

    def of_model(self, model: str) -> tuple[RankedRow, ...]:
        """Return the ranked jobs of one model."""
        return tuple(row for row in self.finished if row.model == model)

    def model_of(self, row: SweepRow) -> str:
        """Return the model of `row`."""
        return model_label(row, self.model_keys)

    def count(self, status: str) -> int:
        """Return the number of jobs without a result that have `status`."""
        return Counter(row.status for row in self.others)[status]


def ranked(data: SweepData) -> Ranking:
    """Rank the jobs by the measure that suits them.

    Ties are broken by fewest devices, then by the measure against it, then by settings.
    """
    data = with_effective_batch(data)
    measures, keys = measures_of(data.rows), models_first(varied(data))
    models, criteria = model_keys(keys), (measures[0].key, "devices_used", against_of(measures).key)
    finished_rows = sorted(filter(finished, data.rows), key=lambda row: _rank(row, criteria, keys))
    names = [model_label(row, models) for row in finished_rows]
    costs = [
        (model, *(_cost(row, key) for key in criteria))
        for row, model in zip(finished_rows, names, strict=True)
    ]
    first_of = {cost: index for index, cost in reversed(list(enumerate(costs)))}
    leader_of = {model: index for index, model in reversed(list(enumerate(names)))}
    optimal = _optimal(finished_rows, names, criteria)
    return Ranking(
        data=data,
        keys=keys,
        measures=measures,
        finished=tuple(
            RankedRow(
                row,
                model,
                best=(costs[index][1] or 0.0) == (costs[leader_of[model]][1] or 0.0),
                pareto=optimal[index],
                repeats=first_of[costs[index]] < index,
                leads=leader_of[model] == index,
            )
            for index, (row, model) in enumerate(zip(finished_rows, names, strict=True))
        ),
        others=tuple(row for row in data.rows if not finished(row)),
    )


def _cost(row: SweepRow, key: str) -> float | None:
    """Return the metric `key` of `row`, negated if higher is better."""
    value = number(row, key)
    return -value if value is not None and BY_NAME[key].better == "higher" else value


def _optimal(rows: list[SweepRow], models: list[str], criteria: Sequence[str]) -> list[bool]:
    """Return whether each row is Pareto-optimal among those of its model."""
    optimal = [False] * len(rows)
    for model in dict.fromkeys(models):
        indices = [index for index, other in enumerate(models) if other == model]
        # A criterion that any of them lacks cannot be compared.
        columns = [[_cost(rows[index], key) for index in indices] for key in criteria]
        known = [[cost or 0.0 for cost in column] for column in columns if None not in column]
        points = list(zip(*known, strict=True))
        for index, is_optimal in zip(indices, frontier(points), strict=True):
            optimal[index] = is_optimal
    return optimal


_Rank = tuple[tuple[tuple[bool, float, str], ...], tuple[float, ...], tuple[str, ...]]


def _rank(row: SweepRow, criteria: Sequence[str], keys: tuple[str, ...]) -> _Rank:
    """Return the sort key of a job, which does not depend on where the sweep was read from."""
    costs = tuple(_cost(row, key) or 0.0 for key in criteria)
    return model_order(row, model_keys(keys)), costs, tuple(cell(row, key) for key in keys)


def best_rows(ranking: Ranking, count: int) -> list[RankedRow]:
    """Return at most `count` of the finished rows, in order, about as many for each model."""
    if len(ranking.finished) <= count:
        return list(ranking.finished)
    by_model = [list(ranking.of_model(model)) for model in ranking.models]
    remaining, per_model = count, 0
    # Add one row of each model at a time, until there is no room.
    while remaining > 0:
        remaining -= sum(len(rows) > per_model for rows in by_model)
        per_model += 1
    chosen = [row for rows in by_model for row in rows[:per_model]]
    return chosen if remaining == 0 else _without_last(by_model, per_model, -remaining)


def _without_last(
    by_model: Sequence[Sequence[RankedRow]], per_model: int, surplus: int
) -> list[RankedRow]:
    """Return `per_model` rows per model, one less for the last `surplus` models with as many."""
    full = [index for index, rows in enumerate(by_model) if len(rows) >= per_model]
    reduced = full[len(full) - surplus :]
    return [
        row
        for index, rows in enumerate(by_model)
        for row in rows[: per_model - 1 if index in reduced else per_model]
    ]
