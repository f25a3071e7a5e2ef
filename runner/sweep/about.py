"""What a sweep is, beside its jobs, and the tags that say it in the store."""

import json
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from fxpart.errors import CacheError
from runner.config.paths import shown_path
from runner.job.identity import without_elsewhere
from runner.job.swept_job import Job

if TYPE_CHECKING:
    from omegaconf import DictConfig

__all__ = ["About", "command_line", "how_to_go_on", "job_folder", "make_folder", "sweep_tags"]


@dataclass(frozen=True, slots=True)
class About:
    """What a sweep is, beside its jobs."""

    title: str
    key: str
    """The sweep's identity: the same command finds what it began."""
    swept: tuple[str, ...]
    """The keys that have several values, in their order."""
    overrides: tuple[str, ...]
    total: int
    """How many jobs there will be."""
    command: str
    """What to type to run it again."""
    question: str = ""
    experiment: str = ""
    """The named experiment, where it is one."""


def sweep_tags(about: About, sweep: str, folder: Path) -> dict[str, str]:
    """Return the tags of the run that stands for the sweep whose id is `sweep`."""
    from runner.job.job_identity import environment_tags

    tags = {
        "kind": "sweep",
        "sweep_id": sweep,
        "sweep_key": about.key,
        "swept": json.dumps(about.swept),
        "folder": str(folder),
        "overrides": json.dumps(about.overrides),
        "command": about.command,
        "question": about.question,
        "experiment": about.experiment,
        **environment_tags(),
    }
    return {name: text for name, text in tags.items() if text}


# What a sweep was asked for, as it is typed.


def command_line(overrides: Sequence[str]) -> str:
    """Return the command that runs the sweep of these overrides, its tracking left out."""
    # What is for Hydra stays: another sweeper makes another sweep.
    kept = without_elsewhere(overrides, ("tracking",))
    return " ".join(["python -m runner -m", *map(shlex.quote, kept)])


# How a sweep that was interrupted is gone on with.


def how_to_go_on(*, resumes: bool, needs_folder: Path | None) -> str:
    """Return what to type, in words that follow a semicolon.

    `resumes` is whether the command takes up what is settled; `needs_folder` is where the results
    lie that a command is to be told of, since no store keeps them.
    """
    changes = [] if resumes else ["without resume=false"]
    if needs_folder is not None:
        changes.append(f"with hydra.sweep.dir={shown_path(needs_folder)}")
    said = " and ".join(changes)
    return f"the same command{' ' if said else ''}{said} goes on"


# Where the files of a sweep go, and those of each job below.

_ODD = re.compile(r"[^\w.+-]+")


def make_folder(folder: Path) -> None:
    """Make the folder of a sweep. Raises `CacheError` where that cannot be."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CacheError(
            f"cannot write {folder}: {error.strerror}; choose another folder with hydra.sweep.dir="
        ) from error


def job_folder(job: Job, config: "DictConfig") -> str:
    """Return the name of the job's folder, such as ``3_gpt2_4x16gb_kl_based``.

    ``hydra.sweep.subdir``, where it was asked for, says otherwise, of Hydra's own values.
    """
    asked = [str(one) for one in config.hydra.overrides.hydra]
    if not any(one.lstrip("+").startswith("hydra.sweep.subdir=") for one in asked):
        choices = job.choices
        parts = (str(job.index), choices.model, choices.devices, choices.mode)
        return "_".join(_ODD.sub("-", part) for part in parts)
    from omegaconf import open_dict

    with open_dict(config):
        config.hydra.job.num = job.index
        config.hydra.job.id = str(job.index)
        for group in ("mode", "devices", "transfer_rate"):
            config.hydra.runtime.choices[group] = getattr(job.choices, group)
        config.hydra.overrides.task = list(job.overrides)
    return str(config.hydra.sweep.subdir)
