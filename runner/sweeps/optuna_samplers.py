"""Optuna's side of the search: from a dimension to its distribution, from a name to a sampler."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from fxpart.errors import SpecError, nearest_names
from runner.sweeps.axes import Axis
from runner.sweeps.optuna_space import Dimension, Interval, keys_of

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution
    from optuna.samplers import BaseSampler

__all__ = ["SAMPLERS", "distributions", "make_sampler", "places"]

_Places = Mapping[str, Sequence[int]]
"""The `places` of each dimension."""


def _tpe(listed: _Places, seed: int | None) -> "BaseSampler":
    from optuna.samplers import TPESampler

    # Of jobs that are asked for at once none knows of the others: each is taken to be bad.
    return TPESampler(seed=seed, constant_liar=True)


def _random(listed: _Places, seed: int | None) -> "BaseSampler":
    from optuna.samplers import RandomSampler

    return RandomSampler(seed=seed)


def _nsgaii(listed: _Places, seed: int | None) -> "BaseSampler":
    from optuna.samplers import NSGAIISampler

    # Optuna's own 50 are more jobs than most sweeps have: all of them would be drawn blindly.
    return NSGAIISampler(population_size=16, seed=seed)


def _qmc(listed: _Places, seed: int | None) -> "BaseSampler":
    from optuna.samplers import QMCSampler, RandomSampler

    return QMCSampler(
        seed=seed,
        scramble=True,
        # For choices, which have no order that a sequence could fill evenly.
        independent_sampler=RandomSampler(seed=seed),
        warn_asynchronous_seeding=False,
        warn_independent_sampling=False,
    )


def _grid(listed: _Places, seed: int | None) -> "BaseSampler":
    from optuna.samplers import GridSampler

    class Grid(GridSampler):
        """Does not stop a loop of Optuna's: ours ends by itself."""

        def after_trial(self, *_: object) -> None:
            """Do nothing."""

    endless = [key for key, values in listed.items() if not values]
    if endless:
        raise SpecError(
            f"hydra.sweeper.sampler=grid needs the values of {endless[0]} counted, and an interval"
            " has no end of them; list them, or take sampler=tpe"
        )
    return Grid(listed, seed=seed)


SAMPLERS: dict[str, Callable[[_Places, int | None], "BaseSampler"]] = {
    "tpe": _tpe,
    "random": _random,
    "grid": _grid,
    "nsgaii": _nsgaii,
    "qmc": _qmc,
}


def make_sampler(name: str, dimensions: Sequence[Dimension], seed: int | None) -> "BaseSampler":
    """Return the sampler of that name; a seed makes it propose the same each time.

    Raises `SpecError` for an unknown name, or a sampler that cannot search these dimensions.
    """
    if name not in SAMPLERS:
        near = nearest_names(name, list(SAMPLERS))
        raise SpecError(f"hydra.sweeper.sampler={name} does not exist; {near}")
    return SAMPLERS[name]({_name(one): places(one) for one in dimensions}, seed)


def distributions(dimensions: Sequence[Dimension]) -> "dict[str, BaseDistribution]":
    """Return what Optuna draws from, in the order of `dimensions`; of listed values the places."""
    return {_name(one): _distribution(one) for one in dimensions}


def _name(dimension: Dimension) -> str:
    return " ".join(keys_of(dimension))


def places(dimension: Dimension) -> Sequence[int]:
    """Return all values as Optuna has them; none where there is no end of them."""
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
