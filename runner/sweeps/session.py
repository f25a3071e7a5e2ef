"""A sweep under way: opened once, given its jobs in one or several goes, summed up at the end."""

import atexit
import json
import secrets
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from fxpart.errors import FxpartError, SpecError
from runner.config import read_tracking
from runner.sweeps.elsewhere import is_in_process, run_elsewhere
from runner.sweeps.job_folder import job_folder
from runner.sweeps.jobs import Job, JobEnd, SweepIds
from runner.sweeps.locks import Locks
from runner.sweeps.missing import set_aside, settled_ends, settled_in_files
from runner.sweeps.one_job import SWEEPS, run_placed
from runner.sweeps.progress import SweepProgress
from runner.sweeps.snapshot import Placed
from runner.tracking import LoggedRun, RunStatus, Tracker, open_tracker

if TYPE_CHECKING:
    from omegaconf import DictConfig

__all__ = ["About", "Session"]

_ATTEMPTS = 2
"""How often a job is started whose process is killed: it may have died of another job."""


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


class Session:
    """Runs jobs, those that are missing, wherever the launcher has them run.

    In a ``with`` statement: the parent run is opened and, whatever happens, closed.
    """

    def __init__(
        self, config: "DictConfig", task_function: Callable[[Any], Any], about: About
    ) -> None:
        self._config, self._task, self.about = config, task_function, about
        self.root = Path.cwd()
        self._resume = bool(config.resume)
        self.is_verbose = bool(config.verbose)
        self._progress = SweepProgress(about.total)
        self.started_ms = int(time.time() * 1000)
        self._is_open = False
        self.lost_why: str | None = None
        """Why jobs were lost, where some were."""
        self.ends: dict[str, JobEnd] = {}
        """By key, what came of each job so far, in the order that they were given."""

    def __enter__(self) -> Self:
        """Open the store and the parent run, once, before any job can.

        Raises:
            SpecError: when another process is at the same sweep.
            TrackingError: for a store that does not work.

        """
        self._tracking = read_tracking(self._config.tracking)
        self.tracker: Tracker = open_tracker(self._tracking, self.root)
        # After the store, so that one that is refused leaves nothing behind.
        self._locks = Locks(self.root)
        if not self._locks.take(self._lock):
            raise SpecError(
                f"another process is at this sweep ({self.about.title}); wait until it ends, or"
                " stop it"
            )
        self._locks.join(SWEEPS)
        self._open_parent()
        self._is_open = True
        # A parent that stayed open would look as if the sweep went on.
        atexit.register(self._close, "KILLED")
        self._progress.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Say how far it came; close the parent run, as killed if the sweep was broken off."""
        self._progress.__exit__(kind, error, traceback)
        if kind is None:
            self._close("FINISHED")
        else:
            with suppress(FxpartError):  # what broke the sweep matters more
                self._close("KILLED")
        self._locks.release(SWEEPS)
        self._locks.release(self._lock)

    def _close(self, status: RunStatus) -> None:
        if self._is_open:
            self._is_open = False
            self.tracker.finish_sweep(self.ids.parent_run, status)

    @property
    def _lock(self) -> str:
        return f"sweep {self.about.key}"

    def _open_parent(self) -> None:
        self.folder = Path(str(self._config.hydra.sweep.dir)).resolve()
        found = self._earlier() if self._resume else None
        if found:
            self.ids = SweepIds(found.tags["sweep_id"], found.run_id)
            before = Path(found.tags.get("folder", ""))
            if not self._asks_for_a_folder() and before.is_absolute() and before.is_dir():
                self.folder = before
            self.tracker.reopen_sweep(found.run_id)
            from runner.unsent import send_unsent

            send_unsent(self.folder, self.tracker)
        else:
            sweep = secrets.token_hex(8)
            parent = self.tracker.start_sweep(self.about.title, self._tags(sweep))
            # Where nothing is kept, the files of an earlier start are known by the same id.
            self.ids = SweepIds(sweep if parent else self.about.key, parent)
        # Launchers keep files of their own beside the jobs.
        from omegaconf import open_dict

        with open_dict(self._config):
            self._config.hydra.sweep.dir = str(self.folder)

    def _earlier(self) -> LoggedRun | None:
        """Return the newest sweep of the same identity."""
        found = self.tracker.runs({"kind": "sweep", "sweep_key": self.about.key})
        return found[-1] if found else None

    def _asks_for_a_folder(self) -> bool:
        asked = self._config.hydra.overrides.hydra
        return any(str(one).startswith("hydra.sweep.dir=") for one in asked)

    def _tags(self, sweep: str) -> dict[str, str]:
        from runner.provenance import environment_tags

        about = self.about
        tags = {
            "kind": "sweep",
            "sweep_id": sweep,
            "sweep_key": about.key,
            "swept": json.dumps(about.swept),
            "folder": str(self.folder),
            "overrides": json.dumps(about.overrides),
            "command": about.command,
            "question": about.question,
            "experiment": about.experiment,
            **environment_tags(),
        }
        return {name: text for name, text in tags.items() if text}

    def run(self, jobs: Sequence[Job]) -> list[JobEnd]:
        """Run what is missing of `jobs`, and return what came of each, in their order.

        A job that is settled, by whichever run, is not run again; one that was cut off is marked
        so and run again. Jobs of one key are one job.

        Raises:
            TrackingError: for a store that cannot be asked.
            CacheError: for a folder that cannot be written.

        """
        new: dict[str, Job] = {}
        for job in jobs:
            if job.key not in self.ends:
                new.setdefault(job.key, job)
        todo = self._without_settled(new) if self._resume else list(new.values())
        placed = [self._placed(job) for job in todo]
        self._refuse_shared_folders(placed)
        if is_in_process(self._config):
            for one in placed:
                self._end(one.job.key, run_placed(one, self.tracker))
        elif placed:
            self._run_elsewhere(placed)
        return [self.ends[job.key] for job in jobs]

    def _without_settled(self, jobs: Mapping[str, Job]) -> list[Job]:
        if self.ids.parent_run is None:
            known = settled_in_files(self.folder, jobs, self.ids.sweep)
        else:
            known = settled_ends(self.tracker, jobs, self.ids.sweep)
        for key, end in known.items():
            self._end(key, end)
        missing = {key: job for key, job in jobs.items() if key not in known}
        set_aside(self.tracker, list(missing), self._locks)
        return list(missing.values())

    def _placed(self, job: Job) -> Placed:
        folder = self.folder / job_folder(job, self._config)
        return Placed(job, folder, self.root, self.ids, self._tracking, self._resume)

    def _refuse_shared_folders(self, placed: Sequence[Placed]) -> None:
        folders = Counter(one.folder for one in placed)
        shared = [folder for folder, jobs in folders.items() if jobs > 1]
        if shared:
            raise SpecError(
                f"{folders[shared[0]]} jobs would write to {shared[0]}; leave out"
                " hydra.sweep.subdir=, or have ${hydra.job.num} in it"
            )

    def _end(self, key: str, end: JobEnd) -> None:
        self.ends[key] = end
        self._progress.add(end)

    def _run_elsewhere(self, placed: Sequence[Placed]) -> None:
        """Hand the jobs to the launcher, and those that were lost once more."""
        left = list(placed)
        for _ in range(_ATTEMPTS):
            self.lost_why = run_elsewhere(left, self._task, self._config, self._end)
            left = [one for one in left if one.job.key not in self.ends]
            if left and self._resume:
                missing = self._without_settled({one.job.key: one.job for one in left})
                left = [one for one in left if one.job in missing]
            if not left:
                return
        for one in left:
            self._end(one.job.key, JobEnd("lost", {}, self.lost_why))
