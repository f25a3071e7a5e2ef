"""All jobs of a sweep, composed before the first one starts."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fxpart.errors import SpecError
from fxpart.support.digest import stable_digest
from runner.config.read import read_config
from runner.config.sections import Config
from runner.experiment.experiment import model_spec
from runner.job.identity import Choices, config_key, inputs_key, without_elsewhere
from runner.job.swept_job import Job
from runner.job.values import deciding
from runner.sweep.axes import Axis
from runner.sweep.loading import SweepLoad

if TYPE_CHECKING:
    from omegaconf import DictConfig

__all__ = ["Composed", "Load", "compose_grid", "compose_one", "make_job"]


Load = Callable[[Sequence[str]], "DictConfig"]
"""Hydra's composition of a job from its overrides; a `SweepLoad` is quick at many."""


@dataclass(frozen=True, eq=False, slots=True)
class Composed:
    """A job as its overrides make it. Jobs share nothing that could be changed."""

    overrides: tuple[str, ...]
    config: Config | None
    """None where the values make no sense."""
    choices: Choices
    error: str | None
    """Why they make no sense, in one line."""


def compose_one(load: Load, overrides: Sequence[str]) -> Composed:
    """Return the job that `overrides` make.

    Raises:
        HydraException: for overrides that Hydra refuses: a choice or key that does not exist.

    """
    quick = _quick(load, overrides)
    if quick is None:
        return _in_full(load, overrides)
    assert isinstance(load, SweepLoad)
    if load.is_exact is None:
        load.is_exact = _are_same(quick, _in_full(load, overrides))
        return compose_one(load, overrides)
    return quick


def compose_grid(load: Load, fixed: Sequence[str], axes: Sequence[Axis]) -> list[Composed]:
    """Return every combination of the values of the axes, the last axis turning fastest.

    Raises:
        HydraException: for a combination that Hydra refuses.

    """
    wanted = [
        (*fixed, *itertools.chain.from_iterable(picked))
        for picked in itertools.product(*(axis.values for axis in axes))
    ]
    jobs = [compose_one(load, overrides) for overrides in wanted]
    if isinstance(load, SweepLoad) and load.is_exact and len(jobs) > 1:
        # The first was compared as it was composed. A Hydra whose inner workings have changed
        # costs time, but no job gets what it did not ask for.
        load.is_exact = _are_same(jobs[-1], _in_full(load, wanted[-1]))
        if not load.is_exact:
            jobs = [_in_full(load, overrides) for overrides in wanted]
    return jobs


def _quick(load: Load, overrides: Sequence[str]) -> Composed | None:
    found = load.quick(overrides) if isinstance(load, SweepLoad) else None
    return None if found is None else _read(overrides, *found)


def _in_full(load: Load, overrides: Sequence[str]) -> Composed:
    from omegaconf import open_dict

    composed = load(overrides)
    choices = dict(composed.hydra.runtime.choices)
    # The job gets its configuration without Hydra's own section, too.
    with open_dict(composed):
        del composed["hydra"]
    return _read(overrides, composed, choices)


def _read(overrides: Sequence[str], composed: "DictConfig", chosen: Mapping[str, Any]) -> Composed:
    config, error = None, None
    try:
        config = read_config(composed)
    except SpecError as wrong:
        error = " ".join(str(wrong).split())
    names = {name: str(chosen.get(name) or "") for name in Choices.__dataclass_fields__}
    if config is not None:
        # What a template such as `transformers` was filled with says more than its name.
        names["model"] = config.model.name
    return Composed(tuple(overrides), config, Choices(**names), error)


def _are_same(one: Composed, other: Composed) -> bool:
    return (one.config, one.choices, one.error) == (other.config, other.choices, other.error)


# The job that a composed configuration makes, with its identity.


def make_job(index: int, composed: Composed) -> Job:
    """Return the job; one whose configuration makes no sense is known by what was asked."""
    config, error = composed.config, composed.error
    key, inputs = "", None
    if config is not None:
        try:
            inputs = inputs_key(config, model_spec(config).key())
            key = config_key(config, inputs)
        except SpecError as wrong:
            config, error = None, " ".join(str(wrong).split())
    if not key:
        key = stable_digest({"overrides": deciding(composed.overrides), "error": error})[:16]
    # A job's overrides go into files and messages, and its tracking may hold a password.
    overrides = without_elsewhere(composed.overrides)
    return Job(index, overrides, composed.choices, config, error, key, inputs)
