"""The jobs of a sweep in order: the best first, and what no other beats marked."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from runner.report.measures import Measure, finished, measures_of, number
from runner.report.pareto import frontier
from runner.report.rows import SweepData, SweepRow
from runner.report.settings import cell, varied

__all__ = ["RankedRow", "Ranking", "best_rows", "ranked"]


@dataclass(frozen=True, slots=True)
class RankedRow:
    """A job and how it compares with the others of its model."""

    row: SweepRow
    model: str
    best: bool
    """Whether none of its model ranks before it; equals are best together."""
    pareto: bool
    """Whether no other of its model is as good in time, memory and devices and better in one."""


@dataclass(frozen=True, slots=True)
class Ranking:
    """A sweep's jobs in order, and what to show of them."""

    data: SweepData
    keys: tuple[str, ...]
    """Settings that the jobs differ in."""
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
    def models(self) -> tuple[str, ...]:
        """All models with a result, in the order of the ranking."""
        return tuple(dict.fromkeys(ranked_row.model for ranked_row in self.finished))

    def of_model(self, model: str) -> tuple[RankedRow, ...]:
        """Return the ranked jobs of one model."""
        return tuple(row for row in self.finished if row.model == model)

    def count(self, status: str) -> int:
        """Return how many jobs without a result ended so."""
        return Counter(row.status for row in self.others)[status]


_PEAKS = ("peak_memory_gib", "schedule_peak_gib")


def ranked(data: SweepData) -> Ranking:
    """Return the jobs in order of the measure that suits them; ties go by their settings."""
    measures, keys = measures_of(data.rows), varied(data)
    by = measures[0].key
    done = sorted((row for row in data.rows if finished(row)), key=lambda row: _rank(row, by, keys))
    best: dict[str, float] = {}
    for row in done:
        best.setdefault(cell(row, "model"), number(row, by) or 0.0)
    optimal = _optimal(done, by, next(m.key for m in measures if m.key in _PEAKS))
    return Ranking(
        data=data,
        keys=keys,
        measures=measures,
        finished=tuple(
            RankedRow(
                row,
                cell(row, "model"),
                best=(number(row, by) or 0.0) == best[cell(row, "model")],
                pareto=pareto,
            )
            for row, pareto in zip(done, optimal, strict=True)
        ),
        others=tuple(row for row in data.rows if not finished(row)),
    )


def _optimal(rows: list[SweepRow], by: str, peak: str) -> list[bool]:
    """Return for each row whether it is Pareto-optimal among those of its model."""
    found = [False] * len(rows)
    for model in dict.fromkeys(cell(row, "model") for row in rows):
        mine = [i for i, row in enumerate(rows) if cell(row, "model") == model]
        # What one of them does not say cannot be compared.
        said = [k for k in (by, peak, "devices_used") if _all_say([rows[i] for i in mine], k)]
        points = [tuple(number(rows[i], key) or 0.0 for key in said) for i in mine]
        for i, optimal in zip(mine, frontier(points), strict=True):
            found[i] = optimal
    return found


def _all_say(rows: list[SweepRow], key: str) -> bool:
    return all(number(row, key) is not None for row in rows)


def _rank(row: SweepRow, by: str, keys: tuple[str, ...]) -> tuple[str, float, tuple[str, ...]]:
    """Return what a job is sorted by: the same wherever the sweep was read from."""
    return cell(row, "model"), number(row, by) or 0.0, tuple(cell(row, key) for key in keys)


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
