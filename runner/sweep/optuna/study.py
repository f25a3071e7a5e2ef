"""The search: Optuna proposes values and is told the results.

Proposals are a function of the seed and the results, so a restarted search repeats its proposals,
and jobs that have a result are not run again.
"""

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Literal

from fxpart.errors import SpecError, nearest_names
from runner.output.metrics import METRICS
from runner.sweep.axes import Axis
from runner.sweep.optuna.space import Dimension, Interval, Space, keys_of
from runner.sweep.swept_job import JobEnd

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution
    from optuna.samplers import BaseSampler

__all__ = [
    "SAMPLERS",
    "Goal",
    "Proposal",
    "Search",
    "Trial",
    "distributions",
    "places",
    "read_goals",
    "refuse_unknown_metrics",
]


# Optuna's samplers by name, and its distributions of dimensions.

_Places = Mapping[str, Sequence[int]]
"""The `places` of each dimension."""


def _tpe(listed: _Places, seed: int | None) -> "BaseSampler":
    from optuna.samplers import TPESampler

    # Proposals of one batch do not know each other's results; pending ones are assumed bad.
    return TPESampler(seed=seed, constant_liar=True)


def _random(listed: _Places, seed: int | None) -> "BaseSampler":
    from optuna.samplers import RandomSampler

    return RandomSampler(seed=seed)


def _nsgaii(listed: _Places, seed: int | None) -> "BaseSampler":
    from optuna.samplers import NSGAIISampler

    # Optuna's default of 50 exceeds most sweeps: all jobs would be in the first generation.
    return NSGAIISampler(population_size=16, seed=seed)


def _qmc(listed: _Places, seed: int | None) -> "BaseSampler":
    from optuna.samplers import QMCSampler, RandomSampler

    return QMCSampler(
        seed=seed,
        scramble=True,
        # For choices, which are unordered and cannot be filled evenly by a sequence.
        independent_sampler=RandomSampler(seed=seed),
        warn_asynchronous_seeding=False,
        warn_independent_sampling=False,
    )


def _grid(listed: _Places, seed: int | None) -> "BaseSampler":
    from optuna.samplers import GridSampler

    class Grid(GridSampler):
        """A grid that does not stop Optuna's loop, since ours ends by itself."""

        def after_trial(self, *_: object) -> None:
            """Do nothing."""

    endless = [key for key, values in listed.items() if not values]
    if endless:
        raise SpecError(
            f"hydra.sweeper.sampler=grid needs a finite list of values for {endless[0]}, not an "
            "interval; list them, or use sampler=tpe"
        )
    return Grid(listed, seed=seed)


SAMPLERS: dict[str, Callable[[_Places, int | None], "BaseSampler"]] = {
    "tpe": _tpe,
    "random": _random,
    "grid": _grid,
    "nsgaii": _nsgaii,
    "qmc": _qmc,
}


def _make_sampler(name: str, dimensions: Sequence[Dimension], seed: int | None) -> "BaseSampler":
    """Return the named sampler, which is deterministic with a seed.

    Raises `SpecError` if the name is unknown, or the sampler cannot search these dimensions.
    """
    if name not in SAMPLERS:
        suggestion = nearest_names(name, list(SAMPLERS))
        raise SpecError(f"hydra.sweeper.sampler={name} does not exist; {suggestion}")
    return SAMPLERS[name]({_name(dimension): places(dimension) for dimension in dimensions}, seed)


def distributions(dimensions: Sequence[Dimension]) -> "dict[str, BaseDistribution]":
    """Return Optuna's distributions of `dimensions`, in order; over indices for listed values."""
    return {_name(dimension): _distribution(dimension) for dimension in dimensions}


def _name(dimension: Dimension) -> str:
    return " ".join(keys_of(dimension))


def places(dimension: Dimension) -> Sequence[int]:
    """Return all values of a dimension as Optuna's numbers; empty if they are infinitely many."""
    if not isinstance(dimension, Interval):
        return range(len(dimension.values))
    return range(int(dimension.low), int(dimension.high) + 1) if dimension.whole else ()


def _distribution(dimension: Dimension) -> "BaseDistribution":
    from optuna.distributions import (
        CategoricalDistribution,
        FloatDistribution,
        IntDistribution,
    )

    if isinstance(dimension, Axis):
        return CategoricalDistribution(range(len(dimension.values)))
    if not isinstance(dimension, Interval):
        return IntDistribution(0, len(dimension.values) - 1)
    if dimension.whole:
        return IntDistribution(int(dimension.low), int(dimension.high), log=dimension.log)
    return FloatDistribution(dimension.low, dimension.high, log=dimension.log)


Direction = Literal["minimize", "maximize"]
_DIRECTIONS: tuple[Direction, ...] = ("minimize", "maximize")
_PATIENCE = 50
"""Known or unwanted proposals in a row after which the sampler is no longer asked."""
_LACKING = 5
"""Finished jobs without a value for some goal, after which the metric is considered wrong."""


@dataclass(frozen=True, slots=True)
class Goal:
    """A metric to minimize or maximize."""

    metric: str
    direction: Direction

    def better(self, value: float, than: float) -> bool:
        """Return whether `value` is strictly better."""
        return value < than if self.direction == "minimize" else value > than


@dataclass(frozen=True, eq=False, slots=True)
class Proposal:
    """A job to run next."""

    trial: int
    """Number of the trial in the study."""
    job: int
    """Number of the job, from 0."""
    overrides: tuple[str, ...]
    """The fixed and the proposed overrides."""


@dataclass(frozen=True, eq=False, slots=True)
class Trial:
    """A proposal with a value for each goal."""

    job: int
    overrides: tuple[str, ...]
    values: tuple[float, ...]


def read_goals(metric: object, direction: object) -> tuple[Goal, ...]:
    """Return the goals of a metric and a direction, or of a list of each.

    Raises `SpecError` if a direction is unknown, a metric repeats, or the lengths differ.
    """
    metrics, directions = _listed(metric), _listed(direction)
    if len(directions) != len(metrics):
        raise SpecError(
            f"hydra.sweeper.metric names {len(metrics)}, hydra.sweeper.direction {len(directions)};"
            " give a direction for each metric, such as"
            " hydra.sweeper.metric=[latency_ms,peak_memory_gib]"
            " hydra.sweeper.direction=[minimize,minimize]"
        )
    if len(set(metrics)) < len(metrics):
        raise SpecError(f"hydra.sweeper.metric names a metric twice: {', '.join(metrics)}")
    return tuple(Goal(name, _direction(way)) for name, way in zip(metrics, directions, strict=True))


def refuse_unknown_metrics(goals: Sequence[Goal]) -> None:
    """Raise `SpecError` for a metric that no job of any configuration has.

    Metrics that depend on the configuration, such as ``step_ms``, are known when jobs finish.
    """
    known = [metric.name for metric in METRICS]
    for goal in goals:
        if goal.metric not in known:
            raise SpecError(_no_metric(goal.metric, known))


def _no_metric(metric: str, known: Iterable[str]) -> str:
    suggestion = nearest_names(metric, known)
    return f"hydra.sweeper.metric={metric} is not a metric of a finished job; {suggestion}"


def _direction(text: str) -> Direction:
    for known in _DIRECTIONS:
        if text == known:
            return known
    suggestion = nearest_names(text, _DIRECTIONS)
    raise SpecError(f"hydra.sweeper.direction={text} does not exist; {suggestion}")


def _listed(value: object) -> list[str]:
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [str(item) for item in value]
    return [str(value)]


class Search:
    """An Optuna study over a space. Not thread-safe."""

    def __init__(
        self, space: Space, goals: Sequence[Goal], sampler: str = "tpe", seed: int | None = 0
    ) -> None:
        """Create the study. Raises `SpecError` if the sampler is unknown or unsuited to `space`."""
        self._space, self._goals = space, tuple(goals)
        self._asked: set[tuple[str, ...]] = set()
        self._jobs = 0
        self._trials: list[Trial] = []
        self._lacking: list[JobEnd] = []
        with _quiet():
            import optuna

            optuna.logging.set_verbosity(optuna.logging.ERROR)
            self._distributions = distributions(space.dimensions)
            self._study = optuna.create_study(
                sampler=_make_sampler(sampler, space.dimensions, seed),
                directions=[goal.direction for goal in goals],
            )

    def ask(
        self, count: int, wanted: Callable[[tuple[str, ...]], bool] = lambda _: True
    ) -> list[Proposal]:
        """Return up to `count` new proposals; fewer if there are no more, or none can be found.

        Repeated proposals are skipped without a result. Those whose overrides are not `wanted` are
        skipped and reported to the sampler as bad.
        """
        proposals: list[Proposal] = []
        in_vain, size = 0, self._space.size()
        while len(proposals) < count and (size is None or len(self._asked) < size):
            if in_vain >= _PATIENCE:
                if size is None:
                    break
                self._study.enqueue_trial(self._unasked())
            with _quiet():
                trial = self._study.ask(self._distributions)
            overrides = self._space.at([trial.params[name] for name in self._distributions])
            known = overrides in self._asked
            self._asked.add(overrides)
            if known or not wanted(overrides):
                in_vain += 1
                self._tell(trial.number, None, failed=known)
                continue
            in_vain = 0
            proposals.append(Proposal(trial.number, self._jobs, overrides))
            self._jobs += 1
        return proposals

    def _unasked(self) -> dict[str, int]:
        """Return the first combination of a finite space that was never proposed."""
        for values in product(*(places(dimension) for dimension in self._space.dimensions)):
            if self._space.at(values) not in self._asked:
                return dict(zip(self._distributions, values, strict=True))
        raise AssertionError("all combinations were proposed")

    def tell(self, proposal: Proposal, end: JobEnd) -> None:
        """Report the result of a proposal. A job without a value for each goal counts as bad.

        Raises `SpecError` if the first few finished jobs have none: the metric must be wrong.
        """
        values = [_number(goal.metric, end) for goal in self._goals] if _is_done(end) else [None]
        numbers = tuple(value for value in values if value is not None)
        if len(numbers) < len(values):
            self._tell(proposal.trial, None)
            if _is_done(end):
                self._lacking.append(end)
            # If all jobs have these metrics, the value was not finite, which is no mistake.
            unconditional = {metric.name for metric in METRICS if not metric.jobs}
            is_unconditional = all(goal.metric in unconditional for goal in self._goals)
            if len(self._lacking) >= _LACKING and not is_unconditional:
                self.refuse_unknown()
            return
        self._tell(proposal.trial, numbers)
        self._trials.append(Trial(proposal.job, proposal.overrides, numbers))

    def refuse_unknown(self) -> None:
        """Raise `SpecError` if jobs have finished, but none with a value for each goal."""
        if not self._lacking or self._trials:
            return
        last = self._lacking[-1]
        metrics = {name for name in last.metrics if _number(name, last) is not None}
        missing = next(goal.metric for goal in self._goals if goal.metric not in metrics)
        raise SpecError(
            f"hydra.sweeper.metric={missing} is not a numeric metric of any finished job; "
            f"{nearest_names(missing, sorted(metrics))}"
        )

    def _tell(self, number: int, values: Sequence[float] | None, *, failed: bool = False) -> None:
        from optuna.trial import TrialState

        # Optuna treats pruned trials as bad, and ignores failed ones.
        without = TrialState.FAIL if failed else TrialState.PRUNED
        with _quiet():
            if values is None:
                self._study.tell(number, state=without)
            else:
                self._study.tell(number, list(values))

    def best(self) -> list[Trial]:
        """Return the best trial, or with several goals the Pareto front.

        The first of equal trials counts. Empty if no trial has a value.
        """
        front: list[Trial] = []
        for trial in sorted(self._trials, key=lambda trial: trial.job):
            if not any(self._as_good(other, trial) for other in front):
                front = [earlier for earlier in front if not self._as_good(trial, earlier)]
                front.append(trial)
        return front

    def _as_good(self, trial: Trial, other: Trial) -> bool:
        """Return whether `trial` is not worse than `other` in any goal."""
        triples = zip(self._goals, trial.values, other.values, strict=True)
        return not any(goal.better(rival, than=value) for goal, value, rival in triples)


def _is_done(end: JobEnd) -> bool:
    return end.status == "finished"


def _number(metric: str, end: JobEnd) -> float | None:
    """Return the metric with the tracker's precision, so that repeated results are the same."""
    value = end.metrics.get(metric)
    # Files omit values that are not finite.
    return float(f"{value:.7g}") if value is not None and math.isfinite(value) else None


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence Optuna's warnings about its samplers, such as that one is experimental."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
