"""What a figure of one parameter shows: its values, and the jobs of each."""

from collections.abc import Sequence
from dataclasses import dataclass

from runner.report.ranking import RankedRow, Ranking
from runner.report.rows import SweepRow
from runner.report.scale import as_number, in_order
from runner.report.settings import cell

__all__ = ["MOST_LINES", "ParameterGroups", "ValueGroup", "grouped"]

MOST_LINES = 8
"""Combinations of the other parameters that are told apart; of more only their spread is drawn."""


@dataclass(frozen=True, slots=True)
class ValueGroup:
    """The jobs of one value of a parameter."""

    value: str
    finished: tuple[RankedRow, ...]
    """The best first."""
    unfit: tuple[SweepRow, ...]
    """Those that do not fit."""
    number: float | None
    """The value as a number."""


@dataclass(frozen=True, slots=True)
class ParameterGroups:
    """Jobs by the values of one parameter."""

    key: str
    groups: tuple[ValueGroup, ...]
    """In the order of the values."""
    others: tuple[str, ...]
    """The other parameters that vary among them."""
    combinations: tuple[str, ...]
    """Of the others' values, those that have a result; empty when there are too many."""

    @property
    def numeric(self) -> bool:
        """Whether all values are numbers."""
        return all(group.number is not None for group in self.groups)

    def combination(self, row: RankedRow) -> str:
        """Return the values of the other parameters."""
        return _combination(row.row, self.others)


def grouped(ranking: Ranking, model: str | None, key: str) -> ParameterGroups:
    """Return the jobs of `model`, or of all models, by their values of `key`."""
    done, others_of_it = _jobs(ranking, model)
    unfit = [row for row in others_of_it if row.status == "infeasible"]
    everyone: Sequence[SweepRow] = [*(row.row for row in done), *unfit]
    others = tuple(
        other
        for other in ranking.keys
        if other != key
        and (model is None or other not in ranking.model_keys)
        and len({cell(row, other) for row in everyone}) > 1
    )
    best: dict[str, float | None] = {}
    for found in done:  # the best first
        best.setdefault(cell(found.row, key), ranking.by.value(found.row))
    for row in unfit:
        best.setdefault(cell(row, key), None)
    groups = tuple(
        ValueGroup(
            value,
            tuple(row for row in done if cell(row.row, key) == value),
            tuple(row for row in unfit if cell(row, key) == value),
            as_number(value),
        )
        for value in in_order(best)
    )
    names = _combinations(ranking, done, others)
    return ParameterGroups(key, groups, others, names if len(names) <= MOST_LINES else ())


def _jobs(ranking: Ranking, model: str | None) -> tuple[Sequence[RankedRow], Sequence[SweepRow]]:
    """Return the jobs with a result, the best first, and those without."""
    if model is not None:
        others = [row for row in ranking.others if ranking.model_of(row) == model]
        return ranking.of_model(model), others
    # The ranking has them model by model.
    done = sorted(ranking.finished, key=lambda found: ranking.by.value(found.row) or 0.0)
    return done, ranking.others


def _combinations(
    ranking: Ranking, done: Sequence[RankedRow], others: Sequence[str]
) -> tuple[str, ...]:
    """Return the other parameters' values that have a result, in their order."""
    best: dict[str, float | None] = {}
    for row in done:
        best.setdefault(_combination(row.row, others), ranking.by.value(row.row))
    return tuple(in_order(best))


def _combination(row: SweepRow, others: Sequence[str]) -> str:
    return " · ".join(cell(row, other) for other in others)
