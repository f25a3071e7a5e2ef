"""Who a job is and where its results go."""

import getpass
import json
import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from fxpart.errors import FxpartError, SpecError
from fxpart.support.host import installed_version
from runner.config.sections import Config, TrackingConfig
from runner.config.tags import config_tags
from runner.experiment.experiment import model_spec
from runner.job.identity import Choices, config_key, inputs_key, without_elsewhere
from runner.job.locks import LOCKS_TAG, Locks
from runner.job.swept_job import SweepIds

__all__ = ["JobIdentity", "environment_tags", "identified", "job_tags", "refuse_changed"]


# Where a result came from: versions, commit, and the command that made it.

_PACKAGES = ("fxpart", "torch", "transformers", "mlflow")
_GIT_S = 2.0


def environment_tags() -> dict[str, str]:
    """Return tags for a run: versions, user, source, and git's state of the working directory.

    What cannot be found out is left out. Git is asked once in a process: its state then is that of
    the code that runs.
    """
    tags = {
        "mlflow.source.name": _command(),
        "mlflow.source.type": "LOCAL",
        "python_version": platform.python_version(),
    }
    for package in _PACKAGES:
        found = installed_version(package)
        if found:
            tags[f"{package}_version"] = found
    with suppress(KeyError, OSError):  # a container may have no such user
        tags["mlflow.user"] = getpass.getuser()
    return tags | _git_tags(Path.cwd())


def _command() -> str:
    """Return the program that was started, short enough for a column."""
    program = Path(sys.argv[0] or "python")
    if program.name == "__main__.py":
        return f"python -m {program.parent.name}"
    return shlex.quote(program.name)


@cache
def _git_tags(root: Path) -> dict[str, str]:
    state = _git(root, "status", "--porcelain=v2", "--branch", "--untracked-files=no")
    if state is None:
        return {}
    tags: dict[str, str] = {}
    changed = False
    for line in state.splitlines():
        match line.split(" ", 2):
            case ["#", "branch.oid", oid] if oid != "(initial)":
                tags["mlflow.source.git.commit"] = oid
            case ["#", "branch.head", branch] if branch != "(detached)":
                tags["mlflow.source.git.branch"] = branch
            case ["#", *_]:
                continue
            case _:
                changed = True
    return {**tags, "git_dirty": str(changed).lower()} if tags else {}


def _git(root: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(root), "--no-optional-locks", *arguments],
            capture_output=True,
            text=True,
            timeout=_GIT_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout


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
    """Its `runner.job.identity.config_key`, where that is known already."""
    inputs: str | None = None
    """Its `identity.inputs_key` where that is known already, from when the sweep began."""
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
    return {"sweeps": f" {sweep.sweep} ", LOCKS_TAG: Locks(root).name}
