"""A sweep under way: opened once, given its jobs in one or several goes, summed up at the end."""

import atexit
import secrets
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from fxpart.errors import SpecError
from runner.config.read import read_tracking
from runner.errors import TrackingError
from runner.job.alone import mark_cut_off_alone
from runner.job.attempts import set_aside
from runner.job.locks import Locks, sweep_lock
from runner.job.swept_job import Job, JobEnd, SweepIds
from runner.sweep.about import About, how_to_go_on, job_folder, make_folder, sweep_tags
from runner.sweep.elsewhere import is_in_process, run_elsewhere
from runner.sweep.leftovers import lost_results, remove_half_written
from runner.sweep.one_job import (
    end_of,
    ends_in_sweep,
    run_placed,
    set_outdated_aside,
    settled_ends,
    settled_in_files,
)
from runner.sweep.progress import SweepProgress
from runner.sweep.snapshot import Placed
from runner.tracking.open_tracker import open_tracker
from runner.tracking.tracker import LoggedRun, RunStatus, Tracker
from runner.tracking.unsent import send_unsent

if TYPE_CHECKING:
    from omegaconf import DictConfig

__all__ = ["About", "Session"]

_ATTEMPTS = 2
"""How often a job is started whose process is killed: it may have died of another job."""


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
        self.jobs: dict[str, Job] = {}
        """By key, those that were given so far."""
        self.ends: dict[str, JobEnd] = {}
        """By key, what came of each job so far."""
        self.problems: list[str] = []
        """What went wrong with the sweep itself."""
        self._counted: set[str] = set()
        self._also: dict[str, tuple[str, ...]] = {}
        """By key, the sweeps in which an attempt at the job was set aside."""
        self._contested: set[str] = set()
        """The keys of jobs of which nobody could tell, when it was asked, whether they are missing.

        Another process was at them, or the store did not answer.
        """

    def __enter__(self) -> Self:
        """Open the store and the parent run, once, before any job can.

        Raises:
            SpecError: when another process is at the same sweep.
            TrackingError: for a store that does not work.

        """
        if self._config.rerun:
            raise SpecError(
                f"rerun={self._config.rerun} is one run, this is a sweep; leave out one of the two"
            )
        self._tracking = read_tracking(self._config.tracking)
        self.tracker: Tracker = open_tracker(self._tracking, self.root)
        # After the store, so that one that is refused leaves nothing behind.
        self._locks = Locks(self.root)
        if not self._locks.take(self._lock):
            raise SpecError(
                f"another process is at this sweep ({self.about.title}); wait until it ends, or"
                " stop it"
            )
        self._others_begun = self._locks.others_begun
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
        if isinstance(error, KeyboardInterrupt):
            # It is said at the very end, as the last line of the command.
            error.add_note(f"{self._progress.tally}; {self._how_to_go_on()}")
        try:
            self._close("FINISHED" if kind is None else "KILLED")
        except TrackingError as gone:
            # The results matter more, as what broke the sweep does.
            self.problems.append(str(gone))
        finally:
            self._locks.release(self._lock)

    def _close(self, status: RunStatus) -> None:
        if self._is_open:
            self._is_open = False
            self.tracker.finish_sweep(self.ids.parent_run, status)

    @property
    def _lock(self) -> str:
        return sweep_lock(self.about.key)

    def _open_parent(self) -> None:
        self.folder = Path(str(self._config.hydra.sweep.dir)).resolve()
        found = self._earlier() if self._resume else None
        if self._resume:
            send_unsent(self.root / "outputs", self.tracker)
            mark_cut_off_alone(self.tracker, self.root)
        if found:
            self.ids = SweepIds(found.tags["sweep_id"], found.run_id, swept=self.about.swept)
            before = Path(found.tags.get("folder", ""))
            if not self._asks_for_a_folder() and before.is_absolute() and before.is_dir():
                self.folder = before
            self.tracker.reopen_sweep(found.run_id)
        else:
            make_folder(self.folder)
            sweep = secrets.token_hex(8)
            parent = self.tracker.start_sweep(
                self.about.title, sweep_tags(self.about, sweep, self.folder)
            )
            # Where nothing is kept, the files of an earlier start are known by the same id.
            known_by = sweep if parent else self.about.key
            self.ids = SweepIds(known_by, parent, swept=self.about.swept)
        remove_half_written(self._config, self.folder, self.root)
        # Launchers keep files of their own beside the jobs.
        from omegaconf import open_dict

        with open_dict(self._config):
            self._config.hydra.sweep.dir = str(self.folder)

    def _earlier(self) -> LoggedRun | None:
        """Return the newest sweep of the same identity."""
        found = self.tracker.runs({"kind": "sweep", "sweep_key": self.about.key})
        return found[-1] if found else None

    def _how_to_go_on(self) -> str:
        is_lost = self.ids.parent_run is None and not self._asks_for_a_folder()
        return how_to_go_on(resumes=self._resume, needs_folder=self.folder if is_lost else None)

    def _asks_for_a_folder(self) -> bool:
        asked = self._config.hydra.overrides.hydra
        return any(str(one).startswith("hydra.sweep.dir=") for one in asked)

    def run(self, jobs: Sequence[Job]) -> list[JobEnd]:
        """Run what is missing of `jobs`, and return what came of each, in their order.

        A job that is settled, by whichever run, is not run again; one that was cut off is marked
        so and run again. Jobs of one key are one job.

        Raises:
            CacheError: for a folder that cannot be written.

        """
        new: dict[str, Job] = {}
        for job in jobs:
            if job.key not in self.ends:
                new.setdefault(job.key, job)
        self.jobs |= new
        todo = self._missing(new) if self._resume else list(new.values())
        placed = [self._placed(job) for job in todo]
        self._refuse_shared_folders(placed)
        if is_in_process(self._config):
            for one in placed:
                key = one.job.key
                begun = None if key in self._contested else self._others_begun
                self._end(key, run_placed(one, self.tracker, begun))
        elif placed:
            self._run_elsewhere(placed)
        return [self.ends[job.key] for job in jobs]

    def _missing(self, jobs: Mapping[str, Job]) -> list[Job]:
        """Return the jobs that are to be run, attempts at them that came to nothing set aside."""
        keys, mine = list(jobs), self.ids.sweep
        # Before the store is asked: what ends between the two is in the store.
        self._contested |= {key for key in keys if self._locks.is_held_elsewhere(key)}
        try:
            others = self._resume
            aside = set_aside(self.tracker, keys, self._locks, self.root, mine, others=others)
            self._join(aside)
            known = self._known(keys)
            left = [key for key in keys if key not in known]
            self._join(set_outdated_aside(self.tracker, left, mine, self.root))
        except TrackingError as gone:
            # It was there when the sweep began: what it cannot say now is found out by running.
            self.problems.append(str(gone))
            self._contested |= jobs.keys()
            known = {}
        for key, end in known.items():
            self._end(key, end)
        return [job for key, job in jobs.items() if key not in known]

    def _join(self, sweeps: Mapping[str, tuple[str, ...]]) -> None:
        """Have jobs count for these sweeps, too, by key."""
        self._also |= {key: (*self._also.get(key, ()), *some) for key, some in sweeps.items()}

    def _known(self, keys: Collection[str]) -> Mapping[str, JobEnd]:
        if self.ids.parent_run is None:
            return settled_in_files(self.folder, keys, self.ids.sweep, self.root)
        if not self._resume:
            return ends_in_sweep(self.tracker, keys, self.ids.sweep)
        return settled_ends(self.tracker, keys, self.ids.sweep, self.root)

    def _placed(self, job: Job) -> Placed:
        folder = self.folder / job_folder(job, self._config)
        ids = replace(self.ids, also=self._also.get(job.key, ()))
        return Placed(job, folder, self.root, ids, self._tracking, self._resume)

    def _refuse_shared_folders(self, placed: Sequence[Placed]) -> None:
        folders = Counter(one.folder for one in placed)
        shared = [folder for folder, jobs in folders.items() if jobs > 1]
        if shared:
            raise SpecError(
                f"{folders[shared[0]]} jobs would write to {shared[0]}; leave out"
                " hydra.sweep.subdir=, or have ${hydra.job.num} in it"
            )

    def notes(self) -> list[str]:
        """Return lines about what the results do not say: files that are gone."""
        parent_run = self.ids.parent_run
        return lost_results(self.folder, self.jobs, self.ends, self._config, parent_run)

    def _end(self, key: str, end: JobEnd) -> None:
        self.ends[key] = end
        self._count(key, end)

    def _count(self, key: str, end: JobEnd) -> None:
        if key not in self._counted:
            self._counted.add(key)
            self._progress.add(end)

    def _run_elsewhere(self, placed: Sequence[Placed]) -> None:
        """Hand the jobs to the launcher, and those that were lost once more."""
        left = list(placed)
        for _ in range(_ATTEMPTS):
            self.lost_why = run_elsewhere(left, self._task, self._config, self._count)
            ends = self._ends_elsewhere(left)
            for key, end in ends.items():
                self._end(key, end)
            lost = {one.job.key: one.job for one in left if one.job.key not in ends}
            if not lost:
                return
            self._progress.tell(f"{len(lost)} of the jobs were lost: {self.lost_why}")
            # Somebody else may have settled one meanwhile.
            left = [self._placed(job) for job in self._missing(lost)]
            if not left:
                return
        for one in left:
            self._end(one.job.key, JobEnd("lost", {}, self.lost_why))

    def _ends_elsewhere(self, placed: Sequence[Placed]) -> dict[str, JobEnd]:
        """Return what came of the jobs that have come to an end, in their files and in the store.

        A result that is in a file alone, and not because the store failed, is of a job whose
        process was killed before it could log it: that job is lost.
        """
        left = {one.job.key: end_of(one.folder, one.sweep.sweep) for one in placed}
        in_files = {key: end for key, end in left.items() if end is not None}
        if self.ids.parent_run is None:
            return in_files
        try:
            # What was edited since is told of at the end of the sweep.
            settled = ends_in_sweep(self.tracker, list(left), self.ids.sweep)
        except TrackingError as gone:
            self.problems.append(str(gone))
            return in_files
        unlogged = {key: end for key, end in in_files.items() if end.error}
        mine = {key: replace(end, known=key not in in_files) for key, end in settled.items()}
        return {**unlogged, **mine}
