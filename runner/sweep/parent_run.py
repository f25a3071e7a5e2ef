"""The sweep as a whole: its identity, its parent run in the tracker, its lock and its folder."""

import json
import secrets
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from fxpart.errors import CacheError, SpecError
from fxpart.support.whole_file import remove_abandoned
from runner.config.paths import shown_path
from runner.config.read import read_tracking
from runner.errors import TrackingError
from runner.job.attempts import mark_cut_off_alone
from runner.job.identity import SweepIds, without_elsewhere
from runner.job.locks import Locks, sweep_lock
from runner.job.record import environment_tags
from runner.tracking.open_tracker import open_tracker
from runner.tracking.tracker import LoggedRun, RunStatus, Tracker
from runner.tracking.unsent import send_unsent

if TYPE_CHECKING:
    from omegaconf import DictConfig

__all__ = ["ParentRun", "SweepSpec", "command_line", "how_to_resume", "opened_parent"]


@dataclass(frozen=True, slots=True)
class SweepSpec:
    """The description of a sweep, without its jobs."""

    title: str
    key: str
    """The sweep's identity, by which the same command resumes it."""
    swept: tuple[str, ...]
    """The keys with several values, in order."""
    overrides: tuple[str, ...]
    total: int
    """Number of jobs."""
    command: str
    """The command that runs it again."""
    question: str = ""
    experiment: str = ""
    """The name of the experiment, if it is one."""


def command_line(overrides: Sequence[str]) -> str:
    """Return the command that runs the sweep of these overrides, without its tracking."""
    # Hydra's overrides stay: another sweeper makes another sweep.
    arguments = without_elsewhere(overrides, ("tracking",))
    return " ".join(["python -m runner -m", *map(shlex.quote, arguments)])


@dataclass(frozen=True, slots=True)
class ParentRun:
    """The open parent run of a sweep, if there is a store."""

    tracker: Tracker
    root: Path
    """The working directory of the sweep."""
    ids: SweepIds
    folder: Path
    """The folder of the jobs' folders."""
    resume_hint: str
    """How to resume the sweep if it is interrupted: the end of a sentence, after a semicolon."""
    problems: list[str]
    """Errors of the sweep itself."""


@contextmanager
def opened_parent(config: "DictConfig", spec: SweepSpec, root: Path) -> Iterator[ParentRun]:
    """Hold the sweep's lock, and open its parent run, an earlier or a new one.

    The run is closed at the end, as KILLED if the sweep breaks off.

    Raises:
        SpecError: if another process is running the same sweep.
        TrackingError: if the store does not work.

    """
    tracker = open_tracker(read_tracking(config.tracking), root)
    locks = Locks(root)  # after the store, so that a store error leaves no files behind
    with locks.held(sweep_lock(spec.key), wait=False) as is_ours:
        if not is_ours:
            raise SpecError(
                f"another process is running this sweep ({spec.title}); wait until it ends, or "
                "stop it"
            )
        parent = _found_or_made(config, spec, tracker, root)
        status: RunStatus = "KILLED"
        try:
            yield parent
            status = "FINISHED"
        finally:
            try:
                tracker.finish_sweep(parent.ids.parent_run, status)
            except TrackingError as gone:
                # Results, and errors that broke the sweep, matter more.
                parent.problems.append(str(gone))


def _found_or_made(
    config: "DictConfig", spec: SweepSpec, tracker: Tracker, root: Path
) -> ParentRun:
    earlier = _earlier(spec, tracker, root) if config.resume else None
    folder = _folder(config, earlier)
    _remove_half_written(config, folder, root)
    # Last, so that nothing fails between opening the run and yielding it.
    if earlier:
        tracker.reopen_sweep(earlier.run_id)
        ids = SweepIds(earlier.tags["sweep_id"], earlier.run_id, spec.swept)
    else:
        sweep = secrets.token_hex(8)
        run_id = tracker.start_sweep(spec.title, _tags(spec, sweep, folder))
        # Without a store, the id identifies the files of an earlier start.
        ids = SweepIds(sweep if run_id else spec.key, run_id, spec.swept)
    is_lost = ids.parent_run is None and not _asks_for_folder(config)
    hint = how_to_resume(resumes=bool(config.resume), needs_folder=folder if is_lost else None)
    return ParentRun(tracker, root, ids, folder, hint, [])


def _earlier(spec: SweepSpec, tracker: Tracker, root: Path) -> LoggedRun | None:
    """Send and mark the leftovers of earlier commands; return the sweep's newest run, if any."""
    send_unsent(root / "outputs", tracker)
    mark_cut_off_alone(tracker, root)
    runs = tracker.runs({"kind": "sweep", "sweep_key": spec.key})
    return runs[-1] if runs else None


def _folder(config: "DictConfig", earlier: LoggedRun | None) -> Path:
    """Create the requested or earlier folder of the sweep, and set it for launchers too."""
    from omegaconf import open_dict

    folder = Path(str(config.hydra.sweep.dir)).resolve()
    if earlier and not _asks_for_folder(config):
        previous = Path(earlier.tags.get("folder", ""))
        folder = previous if previous.is_absolute() and previous.is_dir() else folder
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CacheError(
            f"cannot write {folder}: {error.strerror}; choose another folder with hydra.sweep.dir="
        ) from error
    with open_dict(config):
        config.hydra.sweep.dir = str(folder)
    return folder


def _asks_for_folder(config: "DictConfig") -> bool:
    overrides = config.hydra.overrides.hydra
    return any(str(override).startswith("hydra.sweep.dir=") for override in overrides)


def _remove_half_written(config: "DictConfig", folder: Path, root: Path) -> None:
    """Remove partial files of dead processes, except in jobs' folders: jobs do that themselves."""
    from omegaconf import OmegaConf

    cache = OmegaConf.select(config, "capture.cache_dir", throw_on_resolution_failure=False)
    for parent in (folder, root / "outputs", *([Path(str(cache))] if cache else [])):
        remove_abandoned(parent)


def _tags(spec: SweepSpec, sweep: str, folder: Path) -> dict[str, str]:
    """Return the tags of the parent run of the sweep with id `sweep`."""
    tags = {
        "kind": "sweep",
        "sweep_id": sweep,
        "sweep_key": spec.key,
        "swept": json.dumps(spec.swept),
        "folder": str(folder),
        "overrides": json.dumps(spec.overrides),
        "command": spec.command,
        "question": spec.question,
        "experiment": spec.experiment,
        **environment_tags(),
    }
    return {name: text for name, text in tags.items() if text}


def how_to_resume(*, resumes: bool, needs_folder: Path | None) -> str:
    """Return how to resume a sweep: the end of a sentence, after a semicolon.

    `resumes` is whether the command reuses earlier results; `needs_folder` is the folder to pass to
    the next command, if there is no store.
    """
    changes = [] if resumes else ["without resume=false"]
    if needs_folder is not None:
        changes.append(f"with hydra.sweep.dir={shown_path(needs_folder)}")
    text = " and ".join(changes)
    return f"the same command{' ' if text else ''}{text} resumes it"
