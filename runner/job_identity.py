"""Who a job is and where its results go."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from fxpart.errors import FxpartError, SpecError
from runner.config_tags import config_tags
from runner.experiment import model_spec
from runner.identity import Choices, config_key, inputs_key, without_elsewhere
from runner.provenance import environment_tags
from runner.sections import Config
from runner.sweeps.jobs import SweepIds
from runner.sweeps.locks import LOCKS_TAG, Locks
from runner.tracking import TrackingConfig

__all__ = ["JobIdentity", "identified", "job_tags", "refuse_changed"]


@dataclass(frozen=True, slots=True)
class JobIdentity:
    """Where a job stands in the world."""

    choices: Choices
    overrides: tuple[str, ...]
    """What was asked for on the command line."""
    folder: Path
    """Where its files go."""
    root: Path
    """Where the user started it; MLflow's default store lies in ``outputs`` below."""
    sweep: SweepIds | None = None
    """The sweep that it is a job of."""
    key: str | None = None
    """Its `runner.identity.config_key`, where that is known already."""
    inputs: str | None = None
    """Its `runner.identity.inputs_key` where that is known already, from when the sweep began."""
    tracking: TrackingConfig | None = None
    """Where it is logged if its configuration makes no sense; else the configuration says it."""


def identified(config: Config | None, identity: JobIdentity) -> JobIdentity:
    """Return `identity` with its key and inputs, those that are not known already taken now.

    Without them where the model does not exist: that is refused when the job runs, where its error
    is logged.
    """
    if config is None or (identity.key and identity.inputs):
        return identity
    try:
        inputs = inputs_key(config, model_spec(config).key())
    except FxpartError:
        return identity
    key = identity.key or config_key(config, inputs)
    return replace(identity, key=key, inputs=identity.inputs or inputs)


def refuse_changed(config: Config, identity: JobIdentity) -> None:
    """Refuse a job that has not read what its identity says.

    Raises:
        SpecError: in one line.

    """
    known = identity.inputs
    if known is not None and inputs_key(config, model_spec(config).key()) != known:
        raise SpecError(
            "what decides the result was changed after this began: a source file of the model, a"
            " file that the configuration names, fxpart or torch; give the same command again"
        )


def job_tags(config: Config | None, identity: JobIdentity) -> Mapping[str, str]:
    """Return the tags that a job has from its start, so that one that is cut off is known by them.

    `identity` is an `identified` one.
    """
    return {
        "kind": "run",
        **({"config_key": identity.key} if identity.key else {}),
        **(_sweep_tags(identity.sweep, identity.root) if identity.sweep else {}),
        "overrides": json.dumps(without_elsewhere(identity.overrides)),
        **(config_tags(config) if config else {}),
        **environment_tags(),
    }


def _sweep_tags(sweep: SweepIds, root: Path) -> dict[str, str]:
    """Return which sweeps the job belongs to, and whose locks say whether it is at work."""
    sweeps = " ".join(dict.fromkeys((*sweep.also, sweep.sweep)))
    return {"sweeps": f" {sweeps} ", LOCKS_TAG: Locks(root).name}
