"""The jobs of a sweep in order, and the metrics to show of them.

The best job comes first, and what no other beats in everything is marked.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from runner.output.metrics import BY_NAME, METRICS, Metric
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
    "best_rows",
    "finished",
    "frontier",
    "measures_of",
    "memory_of",
    "number",
    "ranked",
]


# What jobs are compared by.


@dataclass(frozen=True, slots=True)
class Measure:
    """A metric as a report shows it."""

    metric: Metric
    unit: str
    """The metric's or a smaller one, so that its numbers have digits."""
    scale: float = 1.0
    """From the metric's unit to that unit."""

    @property
    def key(self) -> str:
        """The name of the metric."""
        return self.metric.name

    @property
    def name(self) -> str:
        """What people call it."""
        return self.metric.heading

    @property
    def label(self) -> str:
        """Name and unit, such as ``latency, ms``."""
        return f"{self.name}, {self.unit}" if self.unit else self.name

    def value(self, row: SweepRow) -> float | None:
        """Return the number of `row` in this unit, or None."""
        value = number(row, self.key)
        return None if value is None else value * self.scale

    def text(self, row: SweepRow) -> str:
        """Return the number of `row` as it is shown, ``-`` for none."""
        value = self.value(row)
        return "-" if value is None else format(value, self.metric.format)


_SMALLER = {
    "ms": (("us", 1e3), ("ns", 1e6)),
    "GiB": (("MiB", 2.0**10), ("KiB", 2.0**20)),
}
"""Units below, and how many of them one is."""
_LEAST = 0.1
"""A column whose largest number is less shows too few digits: it gets a smaller unit."""
_PEAKS = ("peak_memory_gib", "schedule_peak_gib")


def number(row: SweepRow, key: str) -> float | None:
    """Return the metric `key` of `row`, or what it follows from; None when it has none."""
    derived = _DERIVED.get(key)
    return derived(row.metrics) if derived else row.metrics.get(key)


def _example_ms(metrics: Mapping[str, float]) -> float | None:
    # What takes no time has no finite rate, and an infinite one is not kept.
    rate = metrics.get("examples_per_s", math.inf if "step_ms" in metrics else None)
    return 1e3 / rate if rate else None


def _peak_gib(metrics: Mapping[str, float]) -> float | None:
    """Return the peak of what is run: of a schedule that of its step, not of one microbatch."""
    return metrics.get("schedule_peak_gib", metrics.get("peak_memory_gib"))


_DERIVED: dict[str, Callable[[Mapping[str, float]], float | None]] = {
    "example_ms": _example_ms,
    "peak_memory_gib": _peak_gib,
}


def finished(row: SweepRow) -> bool:
    """Return whether `row` has a result to compare."""
    return row.status == "finished" and row.metrics.get("latency_ms") is not None


def measures_of(rows: Sequence[SweepRow]) -> tuple[Measure, ...]:
    """Return what to show of `rows`; they are ranked by the first.

    Where batch sizes differ, or some have a schedule, that is the time per example, the inverse of
    the throughput: a latency would be that of one input, or of one microbatch.
    """
    done = [row for row in rows if finished(row)]
    with_schedule = [row for row in done if number(row, "step_ms") is not None]
    sizes = {row.settings.get("model.batch_size") for row in done}
    metrics = [metric for metric in METRICS if _has_column(metric, done, len(with_schedule))]
    is_rate = with_schedule or len(sizes) > 1
    if is_rate and all(number(row, "example_ms") is not None for row in done):
        metrics.insert(0, BY_NAME["example_ms"])
    return tuple(_legible(metric, done) for metric in metrics)


def _has_column(metric: Metric, done: Sequence[SweepRow], with_schedule: int) -> bool:
    values = {number(row, metric.name) for row in done}
    scheduled = 0 < with_schedule == len(done)
    return {
        "": False,
        "always": True,
        "plain": not with_schedule,
        "bounded": not with_schedule and bool(values - {None}),
        "mixed": not scheduled,
        "scheduled": scheduled,
        "differs": len(values) > 1,
        "some": bool(values - {None}),
        "trained": any(number(row, "gradients_gib") is not None for row in done),
        "tokens": _counts_tokens(done),
    }[metric.column]


def _counts_tokens(done: Sequence[SweepRow]) -> bool:
    """Return whether tokens say more than examples: of a decode, and of texts of many lengths."""
    if any(number(row, "tpot_ms") is not None for row in done):
        return True
    return len({row.settings.get("model.seq_len") for row in done}) > 1


def _legible(metric: Metric, rows: Sequence[SweepRow]) -> Measure:
    """Return `metric` in a unit in which its numbers have digits."""
    values = [value for row in rows if (value := number(row, metric.name)) is not None]
    most, measure = max(values, default=0.0), Measure(metric, metric.unit)
    for unit, scale in _SMALLER.get(metric.unit, ()):
        if 0 < most * measure.scale < _LEAST:
            measure = replace(measure, unit=unit, scale=scale)
    return measure


def memory_of(measures: Sequence[Measure]) -> Measure:
    """Return the peak memory of the fullest device, which `measures_of` always has."""
    return next(measure for measure in measures if measure.key in _PEAKS)


# The Pareto frontier.


def frontier(points: Sequence[tuple[float, ...]]) -> list[bool]:
    """Return for each point whether it is Pareto-optimal: less is better in each coordinate.

    It is when no other point is as good in all coordinates and better in one; so equal points are
    optimal together. Takes time in proportion to the points by those on the frontier.
    """
    optimal = [False] * len(points)
    kept: list[tuple[float, ...]] = []
    # In lexicographic order what dominates a point comes before it, and by transitivity something
    # on the frontier does.
    for index in sorted(range(len(points)), key=points.__getitem__):
        point = points[index]
        if not any(_dominates(other, point) for other in kept):
            optimal[index] = True
            if not kept or kept[-1] != point:
                kept.append(point)
    return optimal


def _dominates(better: tuple[float, ...], worse: tuple[float, ...]) -> bool:
    return better != worse and all(b <= w for b, w in zip(better, worse, strict=True))


# The ranking.

Mark = Literal["best", "pareto", "equal", ""]


@dataclass(frozen=True, slots=True)
class RankedRow:
    """A job and how it compares with the others of its model."""

    row: SweepRow
    model: str
    """The model, with those of its settings that differ: see `Ranking.model_keys`."""
    best: bool
    """Whether none of its model ranks before it; equals are best together."""
    pareto: bool
    """Whether no other of its model is as good in time, memory and devices and better in one."""
    repeats: bool = False
    """Whether one of its model before it costs the same in time, memory and devices."""
    leads: bool = False
    """Whether it is the first of its model."""

    @property
    def mark(self) -> Mark:
        """How it is marked: of equal ones only the first as good."""
        if self.repeats and (self.best or self.pareto):
            return "equal"
        return "best" if self.leads else "pareto" if self.pareto else ""


@dataclass(frozen=True, slots=True)
class Ranking:
    """A sweep's jobs in order, and what to show of them."""

    data: SweepData
    keys: tuple[str, ...]
    """Settings that the jobs differ in, those that make another model first."""
    measures: tuple[Measure, ...]
    """What to show; the jobs are ranked by the first."""
    finished: tuple[RankedRow, ...]
    """By model, then the best first."""
    others: tuple[SweepRow, ...]
    """Those without a result, in the order of the sweep."""

    @property
    def by(self) -> Measure:
        """What the jobs are ranked by."""
        return self.measures[0]

    @property
    def memory(self) -> Measure:
        """Peak memory of the fullest device."""
        return memory_of(self.measures)

    @property
    def model_keys(self) -> tuple[str, ...]:
        """Those of `keys` that make another model: jobs are compared where these are equal."""
        return model_keys(self.keys)

    @property
    def models(self) -> tuple[str, ...]:
        """All models with a result, in the order of the ranking."""
        return tuple(dict.fromkeys(ranked_row.model for ranked_row in self.finished))

    def of_model(self, model: str) -> tuple[RankedRow, ...]:
        """Return the ranked jobs of one model."""
        return tuple(row for row in self.finished if row.model == model)

    def model_of(self, row: SweepRow) -> str:
        """Return which of the models `row` is of."""
        return model_label(row, self.model_keys)

    def count(self, status: str) -> int:
        """Return how many jobs without a result ended so."""
        return Counter(row.status for row in self.others)[status]


def ranked(data: SweepData) -> Ranking:
    """Return the jobs in order of the measure that suits them.

    Of equals those with the fewest devices come first, then those with the least memory; the rest
    goes by their settings.
    """
    data = with_effective_batch(data)
    measures, keys = measures_of(data.rows), models_first(varied(data))
    models, criteria = model_keys(keys), (measures[0].key, "devices_used", memory_of(measures).key)
    done = sorted(filter(finished, data.rows), key=lambda row: _rank(row, criteria, keys))
    names = [model_label(row, models) for row in done]
    costs = [
        (model, *(_cost(row, key) for key in criteria))
        for row, model in zip(done, names, strict=True)
    ]
    first_of = {cost: index for index, cost in reversed(list(enumerate(costs)))}
    leader_of = {model: index for index, model in reversed(list(enumerate(names)))}
    optimal = _optimal(done, names, criteria)
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
            for index, (row, model) in enumerate(zip(done, names, strict=True))
        ),
        others=tuple(row for row in data.rows if not finished(row)),
    )


def _cost(row: SweepRow, key: str) -> float | None:
    """Return the metric `key` of `row` so that less is better."""
    value = number(row, key)
    return -value if value is not None and BY_NAME[key].better == "higher" else value


def _optimal(rows: list[SweepRow], models: list[str], criteria: Sequence[str]) -> list[bool]:
    """Return for each row whether it is Pareto-optimal among those of its model."""
    optimal = [False] * len(rows)
    for model in dict.fromkeys(models):
        indices = [index for index, other in enumerate(models) if other == model]
        # What one of them lacks cannot be compared.
        columns = [[_cost(rows[index], key) for index in indices] for key in criteria]
        known = [[cost or 0.0 for cost in column] for column in columns if None not in column]
        points = list(zip(*known, strict=True))
        for index, is_optimal in zip(indices, frontier(points), strict=True):
            optimal[index] = is_optimal
    return optimal


_Rank = tuple[tuple[tuple[bool, float, str], ...], tuple[float, ...], tuple[str, ...]]


def _rank(row: SweepRow, criteria: Sequence[str], keys: tuple[str, ...]) -> _Rank:
    """Return what a job is sorted by: the same wherever the sweep was read from."""
    costs = tuple(_cost(row, key) or 0.0 for key in criteria)
    return model_order(row, model_keys(keys)), costs, tuple(cell(row, key) for key in keys)


def best_rows(ranking: Ranking, most: int) -> list[RankedRow]:
    """Return at most `most` of the finished rows in their order, of each model about as many."""
    if len(ranking.finished) <= most:
        return list(ranking.finished)
    by_model = [list(ranking.of_model(model)) for model in ranking.models]
    room, kept = most, 0
    # One more of each model in turn, until there is no room.
    while room > 0:
        room -= sum(len(rows) > kept for rows in by_model)
        kept += 1
    chosen = [row for rows in by_model for row in rows[:kept]]
    return chosen if room == 0 else _without_last(by_model, kept, -room)


def _without_last(
    by_model: Sequence[Sequence[RankedRow]], kept: int, surplus: int
) -> list[RankedRow]:
    """Return `kept` rows of each model, but one less of the last `surplus` that have as many."""
    full = [index for index, rows in enumerate(by_model) if len(rows) >= kept]
    less = full[len(full) - surplus :]
    return [
        row
        for index, rows in enumerate(by_model)
        for row in rows[: kept - 1 if index in less else kept]
    ]
