"""Run jobs in other processes: written to files, passed to a launcher, and read where they run.

Hydra's launchers compose each job again when it starts, from the ``conf/`` of that moment. Here
they get a loader that composes nothing and points to the job's file instead.
"""

import copy
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fxpart.errors import FxpartError, SpecError, one_line
from fxpart.support.garbage import collect_rarely
from fxpart.support.json_file import read_document, what_is_wrong
from fxpart.support.text_files import write_json
from runner.config.schema import Config, TrackingConfig
from runner.config.tags import config_document, config_from_document
from runner.job.identity import Choices, SweepIds
from runner.sweep.launchers.tickets import why
from runner.sweep.one_job import PlacedJob, end_in_folder, remove_earlier_end, run_placed
from runner.sweep.swept_job import Job, JobEnd
from runner.tracking.open_tracker import open_tracker

if TYPE_CHECKING:
    from omegaconf import DictConfig

__all__ = [
    "JOB_KEY",
    "TRACKING_KEY",
    "JobFileLoader",
    "launch",
    "read_placed",
    "run_job_file",
    "write_placed",
]

JOB_KEY = "job_file"
"""Key of the job's file in the configuration that a launcher passes to a job."""
TRACKING_KEY = "tracking"
"""Key of its tracking, which may hold a password and so is never written to our files."""

_JOB_FILE = "job.json"
_SCHEMA, _VERSION = "fxpart.job", 1
_LOOK_S = 0.5
"""Polling interval for ended jobs: Hydra's launchers report only when all have ended."""


# In the sweep's own process.


def launch(
    placed: Sequence[PlacedJob],
    task_function: Callable[[Any], Any],
    config: "DictConfig",
    ended: Callable[[str, JobEnd], None],
) -> str | None:
    """Run the jobs with the launcher of `config`.

    Args:
        placed: the jobs.
        task_function: Hydra's task function of the command.
        config: the sweep's configuration.
        ended: called with the key and the end of each job as soon as it leaves a result.

    Returns:
        Why the launcher broke off or a job failed, in one line; None if all went well.

    Raises:
        FxpartError: if a folder cannot be written, or the launcher can start no job.

    """
    from hydra._internal.callbacks import Callbacks
    from hydra.core.plugins import Plugins
    from hydra.types import HydraContext

    batch = []
    for placed_job in placed:
        remove_earlier_end(placed_job.folder)
        path = placed_job.folder / _JOB_FILE
        write_placed(path, placed_job)
        batch.append([f"{JOB_KEY}={path}", *placed_job.job.overrides])
    loader: Any = JobFileLoader()
    launcher = Plugins.instance().instantiate_launcher(
        hydra_context=HydraContext(config_loader=loader, callbacks=Callbacks()),
        task_function=task_function,
        config=config,
    )
    with _watched(placed, ended):
        try:
            return why(launcher.launch(batch, initial_job_idx=0))
        except FxpartError:
            raise  # no job can be started at all
        # A pool, a cluster or its client may raise anything when a process is killed; the results
        # of the other jobs matter more.
        except Exception as error:
            return one_line(error)


@contextmanager
def _watched(placed: Sequence[PlacedJob], ended: Callable[[str, JobEnd], None]) -> Iterator[None]:
    """Call `ended` for each job with a result, from a thread and once more at the end."""
    pending = list(placed)
    stop = threading.Event()

    def look() -> None:
        for placed_job in list(pending):
            end = end_in_folder(placed_job.folder, placed_job.sweep.sweep)
            if end is not None:
                pending.remove(placed_job)
                ended(placed_job.job.key, end)

    def watch() -> None:
        while not stop.wait(_LOOK_S):
            look()

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        stop.set()
        watcher.join()
        look()


class JobFileLoader:
    """A picklable replacement of Hydra's config loader in launchers."""

    def load_sweep_config(
        self, master_config: "DictConfig", sweep_overrides: Sequence[str]
    ) -> "DictConfig":
        """Return a config of Hydra's section, the path of the job's file and its tracking.

        The first of `sweep_overrides` is ``job_file=PATH``; the others are the job's own, for the
        launcher's log.
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


# In the job's process.


def run_job_file(path: Path, tracking: TrackingConfig) -> str:
    """Run the job of a file, unless it has a result, and return its status.

    A job may start long after its sweep, or after the sweep has ended, and have a result by then.
    """
    collect_rarely()
    placed = read_placed(path, tracking)
    tracker = open_tracker(placed.tracking, placed.root, must_answer=False)
    return run_placed(placed, tracker).status


def write_placed(path: Path, placed: PlacedJob) -> None:
    """Write the job to `path`. Raises `CacheError` if it cannot be written."""
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


def _refuse_other_types(document: Mapping[str, Any]) -> None:
    ids = document["sweep"]
    texts = [document["key"], document["folder"], document["root"], ids["sweep"]]
    texts += [text for text in (document["error"], document["inputs"], ids["parent_run"]) if text]
    lists = (document["overrides"], ids["swept"])
    choices = document["choices"]
    if type(document["index"]) is not int or document["index"] < 0:
        raise ValueError(f"index {document['index']!r}")
    if not all(isinstance(entry, list) for entry in lists) or not isinstance(choices, dict):
        raise ValueError("its overrides, choices or swept keys are of another type")
    for text in (*texts, *lists[0], *lists[1], *(name for name in choices.values() if name)):
        if not isinstance(text, str) or "\0" in text:
            raise ValueError(f"{text!r} is no text")


def read_placed(path: Path, tracking: TrackingConfig) -> PlacedJob:
    """Read the job at `path`, to be logged with `tracking`.

    Raises `SpecError` if the file is missing or damaged.
    """
    document = read_document(path, _SCHEMA, _VERSION)
    try:
        _refuse_other_types(document)
        settings: Mapping[str, Any] | None = document["config"]
        config = config_from_document(settings) if settings is not None else None
        job = Job(
            index=document["index"],
            overrides=tuple(document["overrides"]),
            choices=Choices(**document["choices"]),
            config=replace(config, tracking=tracking) if config else None,
            error=document["error"],
            key=document["key"],
            inputs=document["inputs"],
        )
        ids = document["sweep"]
        return PlacedJob(
            job=job,
            folder=Path(document["folder"]),
            root=Path(document["root"]),
            sweep=SweepIds(ids["sweep"], ids["parent_run"], tuple(ids["swept"])),
            tracking=tracking,
            resume=bool(document["resume"]),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        if isinstance(error, FxpartError):
            raise
        wrong = what_is_wrong(error)
        raise SpecError(f"{path} is damaged ({wrong}); start the sweep again") from error
