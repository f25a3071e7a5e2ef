"""A job as a file, for processes that other launchers start: composed once, read where it runs.

Hydra's launchers compose each job again when it starts, from whatever the files say by then. Here
they get a loader that composes nothing: it points to the file that was written at the start.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fxpart.errors import SpecError
from fxpart.support.json_file import read_document, what_is_wrong
from runner.config.sections import Config, TrackingConfig
from runner.config.tags import config_document, config_from_document
from runner.job.identity import Choices
from runner.job.swept_job import Job, SweepIds
from runner.output.text_files import write_json

if TYPE_CHECKING:
    from omegaconf import DictConfig

__all__ = ["JOB_KEY", "TRACKING_KEY", "Placed", "SnapshotLoader", "read_placed", "write_placed"]

JOB_KEY = "job_file"
"""Of the configuration that a launcher hands to a job: where the job stands."""
TRACKING_KEY = "tracking"
"""Of the same: where it is logged, which may hold a password and so stands in no file of ours."""

_SCHEMA, _VERSION = "fxpart.job", 1


@dataclass(frozen=True, eq=False, slots=True)
class Placed:
    """A job, where its files go, and what it belongs to."""

    job: Job
    folder: Path
    root: Path
    """Where the sweep was started."""
    sweep: SweepIds
    tracking: TrackingConfig
    """Where the job is logged."""
    resume: bool
    """Whether the job is left out if it is settled by the time that it starts."""


def write_placed(path: Path, placed: Placed) -> None:
    """Write the job to `path`. Raises `CacheError` when the place cannot be written."""
    job = placed.job
    document = {
        "schema": _SCHEMA,
        "version": _VERSION,
        "index": job.index,
        "overrides": job.overrides,
        "choices": asdict(job.choices),
        "config": _without_tracking(job.config) if job.config else None,
        "error": job.error,
        "key": job.key,
        "inputs": job.inputs,
        "folder": placed.folder,
        "root": placed.root,
        "sweep": asdict(placed.sweep),
        "resume": placed.resume,
    }
    write_json(path, document)


def _without_tracking(config: Config) -> dict[str, object]:
    document = config_document(config)
    return {key: value for key, value in document.items() if key != TRACKING_KEY}


def read_placed(path: Path, tracking: TrackingConfig) -> Placed:
    """Return the job at `path`, to be logged by `tracking`.

    Raises `SpecError` when the file is missing or damaged.
    """
    said = read_document(path, _SCHEMA, _VERSION)
    try:
        document: Mapping[str, Any] | None = said["config"]
        config = config_from_document(document) if document is not None else None
        job = Job(
            index=said["index"],
            overrides=tuple(said["overrides"]),
            choices=Choices(**said["choices"]),
            config=replace(config, tracking=tracking) if config else None,
            error=said["error"],
            key=said["key"],
            inputs=said["inputs"],
        )
        ids = said["sweep"]
        sweep = SweepIds(ids["sweep"], ids["parent_run"], tuple(ids["also"]), tuple(ids["swept"]))
        return Placed(
            job=job,
            folder=Path(said["folder"]),
            root=Path(said["root"]),
            sweep=sweep,
            tracking=tracking,
            resume=bool(said["resume"]),
        )
    except (KeyError, TypeError) as error:
        wrong = what_is_wrong(error)
        raise SpecError(f"{path} is damaged ({wrong}); start the sweep again") from error


class SnapshotLoader:
    """Takes the place of Hydra's composition in a launcher; travels to any process."""

    def load_sweep_config(
        self, master_config: "DictConfig", sweep_overrides: Sequence[str]
    ) -> "DictConfig":
        """Return Hydra's own part of `master_config`, and of the job where its file is.

        The first of `sweep_overrides` is ``job_file=PATH``, the others are what the job is made of,
        for the launcher's log.
        """
        from omegaconf import DictConfig, OmegaConf, open_dict

        first, *overrides = sweep_overrides
        path = Path(first.partition("=")[2])
        composed = DictConfig(
            {
                "hydra": copy.deepcopy(master_config.hydra),
                JOB_KEY: str(path),
                TRACKING_KEY: copy.deepcopy(master_config.tracking),
            }
        )
        OmegaConf.set_struct(composed, True)
        with open_dict(composed):
            composed.hydra.overrides.task = list(overrides)
            composed.hydra.sweep.dir = str(path.parent.parent)
            composed.hydra.sweep.subdir = path.parent.name
        return composed
