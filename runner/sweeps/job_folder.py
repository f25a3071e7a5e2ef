"""Where the files of a sweep go, and those of each job below."""

import re
from pathlib import Path
from typing import TYPE_CHECKING

from fxpart.errors import CacheError
from runner.sweeps.jobs import Job

if TYPE_CHECKING:
    from omegaconf import DictConfig

__all__ = ["job_folder", "make_folder"]

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
