"""Who a job is and where its results go."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from fxpart.errors import FxpartError
from runner.config_tags import config_tags
from runner.experiment import model_spec
from runner.identity import Choices, config_key, without_elsewhere
from runner.provenance import environment_tags
from runner.sections import Config
from runner.sweeps.jobs import SweepIds
from runner.sweeps.locks import LOCKS_TAG, Locks
from runner.tracking import TrackingConfig

__all__ = ["JobIdentity", "job_key", "job_tags"]


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
    tracking: TrackingConfig | None = None
    """Where it is logged if its configuration makes no sense; else the configuration says it."""


def job_key(config: Config | None, identity: JobIdentity) -> str | None:
    """Return the hash of what decides the job's result; None where its model does not exist."""
    if identity.key is not None or config is None:
        return identity.key
    try:
        return config_key(config, model_spec(config).key())
    # Refused again when the job runs, where its error is logged.
    except FxpartError:
        return None


def job_tags(config: Config | None, identity: JobIdentity, key: str | None) -> Mapping[str, str]:
    """Return the tags that a job has from its start, so that one that is cut off is known by them.

    `key` is its `job_key`.
    """
    return {
        "kind": "run",
        **({"config_key": key} if key else {}),
        **(_sweep_tags(identity.sweep, identity.root) if identity.sweep else {}),
        "overrides": json.dumps(without_elsewhere(identity.overrides)),
        **(config_tags(config) if config else {}),
        **environment_tags(),
    }


def _sweep_tags(sweep: SweepIds, root: Path) -> dict[str, str]:
    """Return which sweeps the job belongs to, and whose locks say whether it is at work."""
    sweeps = " ".join(dict.fromkeys((*sweep.also, sweep.sweep)))
    return {"sweeps": f" {sweeps} ", LOCKS_TAG: Locks(root).name}
