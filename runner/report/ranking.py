"""The jobs of a sweep in order: the best first, and what no other beats marked."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from runner.report.measures import Measure, finished, measures_of, number
from runner.report.model_values import model_keys, model_label, model_order
from runner.report.rows import SweepData, SweepRow
from runner.report.settings import cell, varied

__all__ = ["RankedRow", "Ranking", "best_rows", "frontier", "models_first", "ranked"]


# The Pareto frontier: what nothing else beats in everything at once.


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
        """What is to be said of it: of equal ones only the first is said to be good."""
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
    """The first is what the jobs are ranked by."""
    finished: tuple[RankedRow, ...]
    """By model, then the best first."""
    others: tuple[SweepRow, ...]
    """Those without a result, in the order of the sweep."""

    @property
    def by(self) -> Measure:
        """What the jobs are ranked by: the less, the better."""
        return self.measures[0]

    @property
    def memory(self) -> Measure:
        """Peak memory of the fullest device."""
        return next(measure for measure in self.measures if measure.key in _PEAKS)

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


_PEAKS = ("peak_memory_gib", "schedule_peak_gib")


def ranked(data: SweepData) -> Ranking:
    """Return the jobs in order of the measure that suits them.

    Of equals those with the fewest devices come first, then those with the least memory; the rest
    goes by their settings.
    """
    measures, keys = measures_of(data.rows), models_first(varied(data))
    models = model_keys(keys)
    by, peak = measures[0].key, next(m.key for m in measures if m.key in _PEAKS)
    costs_of = (by, "devices_used", peak)
    done = sorted(
        (row for row in data.rows if finished(row)), key=lambda row: _rank(row, costs_of, keys)
    )
    named = [model_label(row, models) for row in done]
    best: dict[str, float] = {}
    for row, model in zip(done, named, strict=True):
        best.setdefault(model, number(row, by) or 0.0)
    optimal = _optimal(done, named, by, peak)
    costs = [
        (model, *(number(row, key) for key in costs_of))
        for row, model in zip(done, named, strict=True)
    ]
    firsts = {cost: index for index, cost in reversed(list(enumerate(costs)))}
    return Ranking(
        data=data,
        keys=keys,
        measures=measures,
        finished=tuple(
            RankedRow(
                row,
                model,
                best=(number(row, by) or 0.0) == best[model],
                pareto=optimal[index],
                repeats=firsts[costs[index]] < index,
                leads=index == 0 or named[index - 1] != model,
            )
            for index, (row, model) in enumerate(zip(done, named, strict=True))
        ),
        others=tuple(row for row in data.rows if not finished(row)),
    )


def models_first(keys: tuple[str, ...]) -> tuple[str, ...]:
    """Return `keys`, those that make another model before the others."""
    models = model_keys(keys)
    return (*models, *(key for key in keys if key not in models))


def _optimal(rows: list[SweepRow], models: list[str], by: str, peak: str) -> list[bool]:
    """Return for each row whether it is Pareto-optimal among those of its model."""
    found = [False] * len(rows)
    for model in dict.fromkeys(models):
        mine = [i for i, other in enumerate(models) if other == model]
        # What one of them does not say cannot be compared.
        said = [k for k in (by, peak, "devices_used") if _all_say([rows[i] for i in mine], k)]
        points = [tuple(number(rows[i], key) or 0.0 for key in said) for i in mine]
        for i, optimal in zip(mine, frontier(points), strict=True):
            found[i] = optimal
    return found


def _all_say(rows: list[SweepRow], key: str) -> bool:
    return all(number(row, key) is not None for row in rows)


_Rank = tuple[tuple[tuple[bool, float, str], ...], tuple[float, ...], tuple[str, ...]]


def _rank(row: SweepRow, costs: tuple[str, ...], keys: tuple[str, ...]) -> _Rank:
    """Return what a job is sorted by: the same wherever the sweep was read from."""
    model = model_order(row, model_keys(keys))
    numbers = tuple(number(row, key) or 0.0 for key in costs)
    return model, numbers, tuple(cell(row, key) for key in keys)


def best_rows(ranking: Ranking, most: int) -> list[RankedRow]:
    """Return at most `most` of the finished rows in their order, of each model about as many."""
    if len(ranking.finished) <= most:
        return list(ranking.finished)
    by_model = [list(ranking.of_model(model)) for model in ranking.models]
    room, kept = most, 0
    # One more of each model in turn, until there is no room.
    while room > 0:
        room -= sum(1 for rows in by_model if len(rows) > kept)
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
