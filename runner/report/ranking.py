"""The jobs of a sweep in order: the best first, and what no other beats marked."""

from collections import Counter
from dataclasses import dataclass

from runner.report.measures import Measure, finished, measures_of, number
from runner.report.pareto import frontier
from runner.report.rows import SweepData, SweepRow
from runner.report.settings import CHOICES, cell, varied

__all__ = ["RankedRow", "Ranking", "ranked"]


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
    measures = measures_of(data.rows)
    by = measures[0].key
    done = sorted((row for row in data.rows if finished(row)), key=lambda row: _rank(row, by))
    best: dict[str, float] = {}
    for row in done:
        best.setdefault(cell(row, "model"), number(row, by) or 0.0)
    optimal = _optimal(done, by, next(m.key for m in measures if m.key in _PEAKS))
    return Ranking(
        data=data,
        keys=varied(data),
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


def _rank(row: SweepRow, by: str) -> tuple[str, float, str]:
    settings = " ".join(cell(row, key) for key in CHOICES) + row.name
    return cell(row, "model"), number(row, by) or 0.0, settings
