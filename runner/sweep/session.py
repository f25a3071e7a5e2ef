"""A running sweep: opened, given its jobs in one or several batches, and closed."""

import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from fxpart.errors import SpecError
from runner.config.read import read_tracking
from runner.errors import TrackingError
from runner.job.attempts import set_aside
from runner.job.job import TRACEBACK_IN
from runner.job.locks import Locks
from runner.output.countdown import Countdown, say
from runner.output.result_files import SETTLED
from runner.output.terminal import counted
from runner.sweep.launching import launch
from runner.sweep.one_job import (
    PlacedJob,
    end_in_folder,
    ends_in_files,
    ends_in_store,
    run_placed,
)
from runner.sweep.parent_run import ParentRun, SweepSpec, opened_parent
from runner.sweep.swept_job import Job, JobEnd

if TYPE_CHECKING:
    from omegaconf import DictConfig

__all__ = ["Session", "SweepProgress", "job_folder", "opened_session"]

_ATTEMPTS = 2
"""Most attempts at a job whose process is killed: another job may be to blame."""
_MOST_SHOWN = 5
"""Most errors shown where a sweep breaks off."""
_IN_PROCESS = "hydra._internal.core_plugins.basic_launcher.BasicLauncher"
"""Hydra's default launcher, for which jobs run in the sweep's own process."""
_ODD = re.compile(r"[^\w.+-]+")


@contextmanager
def opened_session(
    config: "DictConfig", task_function: Callable[[Any], Any], spec: SweepSpec
) -> Iterator["Session"]:
    """Open the store and the sweep's parent run before any job; close the run in any case.

    Raises:
        SpecError: if another process is running the same sweep, or ``rerun=`` is given.
        TrackingError: if the store does not work.

    """
    if config.rerun:
        raise SpecError(
            f"rerun={config.rerun} repeats one run, but this is a sweep; leave out one of the two"
        )
    with opened_parent(config, spec, Path.cwd()) as parent:
        session = Session(config, task_function, spec, parent)
        try:
            with session.progress:
                yield session
        except BaseException as error:
            # Such a sweep prints no table, which is where errors are listed.
            for line in (*session.progress.failures, *dict.fromkeys(parent.problems)):
                say(line)
            if isinstance(error, KeyboardInterrupt):
                # Printed as the last line of the command.
                error.add_note(f"{session.progress.tally}; {parent.resume_hint}")
            raise


class Session:
    """Runs the jobs without a result, here or by the chosen launcher."""

    def __init__(
        self,
        config: "DictConfig",
        task_function: Callable[[Any], Any],
        spec: SweepSpec,
        parent: ParentRun,
    ) -> None:
        self.config, self._task, self.spec, self.parent = config, task_function, spec, parent
        self.root, self.tracker = parent.root, parent.tracker
        self._tracking = read_tracking(config.tracking)
        self._resume = bool(config.resume)
        self.progress = SweepProgress(spec.total)
        self.started_ms = int(time.time() * 1000)
        self.jobs: dict[str, Job] = {}
        """All jobs so far, by key."""
        self.ends: dict[str, JobEnd] = {}
        """The ends of jobs, by key."""
        self.lost_why: str | None = None
        """Why jobs were lost, if any were."""
        self._locks = Locks(self.root)

    def run(self, jobs: Sequence[Job]) -> list[JobEnd]:
        """Run the `jobs` without a result, and return the end of each job, in order.

        A result of any run counts. A job that was cut off is marked as such and run again. Jobs
        with the same key are one job.

        Raises:
            CacheError: if a folder cannot be written.

        """
        new: dict[str, Job] = {}
        for job in jobs:
            if job.key not in self.ends:
                new.setdefault(job.key, job)
        self.jobs |= new
        missing = self._missing(new) if self._resume else list(new.values())
        placed = [self._placed(job) for job in missing]
        _refuse_shared_folders(placed)
        if str(self.config.hydra.launcher.get("_target_")) == _IN_PROCESS:
            for placed_job in placed:
                self._end(placed_job.job.key, run_placed(placed_job, self.tracker))
        elif placed:
            self._launch(placed)
        return [self.ends[job.key] for job in jobs]

    def _missing(self, jobs: Mapping[str, Job]) -> list[Job]:
        """Return the jobs without a result, after setting aside their earlier attempts."""
        keys, sweep = list(jobs), self.parent.ids.sweep
        try:
            set_aside(self.tracker, keys, self._locks, self.root, sweep)
            known = self._known(keys)
        except TrackingError as gone:
            # The store has gone since the sweep began; run the jobs without it.
            self.parent.problems.append(str(gone))
            known = {}
        for key, end in known.items():
            self._end(key, end)
        return [job for key, job in jobs.items() if key not in known]

    def _known(self, keys: Sequence[str]) -> Mapping[str, JobEnd]:
        ids = self.parent.ids
        if ids.parent_run is None:
            return ends_in_files(self.parent.folder, keys, ids.sweep)
        return ends_in_store(self.tracker, keys, ids.sweep, resume=self._resume)

    def _placed(self, job: Job) -> PlacedJob:
        folder = self.parent.folder / job_folder(job, self.config)
        return PlacedJob(job, folder, self.root, self.parent.ids, self._tracking, self._resume)

    def _end(self, key: str, end: JobEnd) -> None:
        self.ends[key] = end
        self.progress.add(key, end)

    def _launch(self, placed: Sequence[PlacedJob]) -> None:
        """Run the jobs with the launcher, and lost ones once more."""
        pending = list(placed)
        for _ in range(_ATTEMPTS):
            self.lost_why = launch(pending, self._task, self.config, self.progress.add)
            ends = self._ends_of(pending)
            for key, end in ends.items():
                self._end(key, end)
            lost = {
                placed_job.job.key: placed_job.job
                for placed_job in pending
                if placed_job.job.key not in ends
            }
            if not lost:
                return
            say(f"{len(lost)} of the jobs were lost: {self.lost_why}")
            # Another process may have finished one in the meantime.
            pending = [self._placed(job) for job in self._missing(lost)]
            if not pending:
                return
        for placed_job in pending:
            self._end(placed_job.job.key, JobEnd("lost", {}, self.lost_why))

    def _ends_of(self, launched: Sequence[PlacedJob]) -> dict[str, JobEnd]:
        """Return the ends of jobs in their files and in the store.

        A result that is only in a file, without an error of the store, is from a process killed
        before it could log: that job is lost.
        """
        sweep = self.parent.ids.sweep
        by_key = {
            placed_job.job.key: end_in_folder(placed_job.folder, sweep) for placed_job in launched
        }
        in_files = {key: end for key, end in by_key.items() if end is not None}
        if self.parent.ids.parent_run is None:
            return in_files
        try:
            in_store = ends_in_store(self.tracker, list(by_key), sweep, resume=False)
        except TrackingError as gone:
            self.parent.problems.append(str(gone))
            return in_files
        unlogged = {key: end for key, end in in_files.items() if end.error}
        logged = {key: replace(end, known=key not in in_files) for key, end in in_store.items()}
        return {**unlogged, **logged}


def job_folder(job: Job, config: "DictConfig") -> str:
    """Return the name of the job's folder, such as ``3_gpt2_4x16gb_kl_based``.

    If ``hydra.sweep.subdir`` is overridden, it is that, resolved with Hydra's values for the job.
    """
    overrides = [str(override).lstrip("+") for override in config.hydra.overrides.hydra]
    if not any(override.startswith("hydra.sweep.subdir=") for override in overrides):
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


def _refuse_shared_folders(placed: Sequence[PlacedJob]) -> None:
    folders = Counter(placed_job.folder for placed_job in placed)
    shared = [folder for folder, jobs in folders.items() if jobs > 1]
    if shared:
        raise SpecError(
            f"{folders[shared[0]]} jobs would write to {shared[0]}; leave out"
            " hydra.sweep.subdir=, or include ${hydra.job.num} in it"
        )


class SweepProgress:
    """Progress over jobs: a bar on a terminal; in a log, a line now and then and one at the end."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._ended: set[str] = set()
        self._counts: Counter[str] = Counter()
        self._errors: list[str] = []
        self._countdown = Countdown("jobs", total)

    def __enter__(self) -> Self:
        """Start the clock, and the bar on a terminal."""
        self._countdown.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Remove the bar and print the tally, except after an interrupt, whose line has it."""
        self._countdown.stop()
        if not isinstance(error, KeyboardInterrupt):
            say(f"{self.tally}{self._countdown.took}")

    def add(self, key: str, end: JobEnd) -> None:
        """Count the job of `key`, once."""
        if key in self._ended:
            return
        self._ended.add(key)
        self._counts[end.status] += 1
        self._counts["known"] += end.known
        if end.status not in SETTLED and end.error:
            self._errors.append(end.error)
        self._countdown.add(lambda: self.tally, took_time=not end.known)

    @property
    def failures(self) -> list[str]:
        """A line for each of the most frequent errors that jobs failed with."""
        errors: dict[str, list[str]] = {}
        for error in tuple(self._errors):
            errors.setdefault(error.partition(TRACEBACK_IN)[0], []).append(error)
        ranked = sorted(errors.values(), key=len, reverse=True)
        lines = [f"{counted(len(same), 'job')} failed: {same[0]}" for same in ranked[:_MOST_SHOWN]]
        others = sum(map(len, ranked[_MOST_SHOWN:]))
        return lines + [f"{counted(others, 'job')} failed with other errors"] * bool(others)

    @property
    def tally(self) -> str:
        """The counts as text: ``12 of 48 jobs done (4 before, 2 do not fit, 1 failed)``."""
        before, unfit = self._counts["known"], self._counts["infeasible"]
        failed = self._counts["failed"] + self._counts["lost"]
        inapplicable = self._counts["not_applicable"]
        notes = [
            f"{before} before" if before else "",
            f"{unfit} {'does' if unfit == 1 else 'do'} not fit" if unfit else "",
            f"{inapplicable} not applicable" if inapplicable else "",
            f"{failed} failed" if failed else "",
        ]
        text = ", ".join(note for note in notes if note)
        jobs = counted(self._total, "job")
        return f"{self._countdown.done} of {jobs} done{f' ({text})' if text else ''}"
