"""Attempts without a result: which are marked, and which are left alone."""

import sqlite3
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from subprocess import PIPE

import pytest

from runner.config.schema import TrackingConfig
from runner.job.attempts import set_aside, set_aside_held
from runner.job.locks import LOCKS_TAG, Locks
from runner.tracking import mlflow_tracker
from runner.tracking.open_tracker import open_tracker
from runner.tracking.tracker import RunLog, Tracker
from tests.runner.tracked import impatient

__all__ = ["impatient"]

pytestmark = pytest.mark.usefixtures("store")


@pytest.fixture
def tracker(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    impatient: None,
) -> Tracker:
    """In a folder in which nobody works."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(mlflow_tracker, "_PAUSE_S", 0)
    return open_tracker(TrackingConfig(), folder)


@pytest.fixture
def locks(folder: Path) -> Locks:
    return Locks(folder)


@contextmanager
def _begun(tracker: Tracker, locks: Locks | None, **tags: str) -> Iterator[RunLog]:
    """Yield a run in progress whose lock nobody holds, as if its process had been killed."""
    name = locks.name if locks else "of another folder"
    all_tags = {"config_key": "abc", "sweeps": " one ", LOCKS_TAG: name, **tags}
    with tracker.start("run", {}, all_tags, folder=Path("outputs")) as run:
        yield run


def _tags(tracker: Tracker, run: RunLog) -> Mapping[str, str]:
    assert run.run_id
    return tracker.run(run.run_id).tags


def test_a_run_that_another_folder_may_work_on_is_left_alone(
    tracker: Tracker, locks: Locks
) -> None:
    with _begun(tracker, None) as elsewhere, _begun(tracker, locks) as dead:
        set_aside(tracker, ["abc"], locks, Path(), "mine")
        kinds = [_tags(tracker, run)["kind"] for run in (elsewhere, dead)]
        assert kinds == ["run", "cut_off"]


def test_a_single_run_is_left_alone(tracker: Tracker, locks: Locks) -> None:
    with _begun(tracker, locks, sweeps="") as single:
        set_aside(tracker, ["abc"], locks, Path(), "mine")
        assert _tags(tracker, single)["kind"] == "run"


def test_a_job_that_another_process_works_on_is_left_alone(
    tracker: Tracker, locks: Locks, folder: Path
) -> None:
    hold = "from pathlib import Path; from runner.job.locks import *"
    hold += "\nwith Locks(Path.cwd()).held('abc'): print(flush=True); input()"
    holder = [sys.executable, "-c", hold]
    with _begun(tracker, locks) as run:
        with subprocess.Popen(holder, cwd=folder, stdin=PIPE, stdout=PIPE, text=True) as at_work:
            assert at_work.stdout
            assert at_work.stdout.readline() == "\n"
            set_aside(tracker, ["abc"], locks, Path(), "one")
            assert _tags(tracker, run)["kind"] == "run"
            at_work.communicate("\n")
        set_aside(tracker, ["abc"], locks, Path(), "one")
        assert _tags(tracker, run)["kind"] == "cut_off"


def test_without_locks_running_jobs_are_unknown(
    tracker: Tracker, locks: Locks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Locks, "are_supported", False)
    with _begun(tracker, locks) as run:
        set_aside(tracker, ["abc"], locks, Path(), "one")
        assert _tags(tracker, run)["kind"] == "run"


@pytest.mark.parametrize("sweep", ["one", "two"])
def test_a_failure_is_set_aside_in_its_own_sweep(
    tracker: Tracker, locks: Locks, sweep: str
) -> None:
    with pytest.raises(ValueError, match="bad"), _begun(tracker, locks) as failed:
        raise ValueError("bad")
    set_aside(tracker, ["abc"], locks, Path(), sweep)
    assert _tags(tracker, failed)["kind"] == ("superseded" if sweep == "one" else "run")


def test_a_run_that_ended_without_the_store_is_a_result(
    tracker: Tracker, locks: Locks, folder: Path
) -> None:
    store = sqlite3.connect(folder / "outputs" / "mlflow.db", isolation_level=None)
    with closing(store):
        with _begun(tracker, locks) as run:
            store.execute("BEGIN IMMEDIATE")
        store.execute("ROLLBACK")
    unsent = folder / "outputs" / "unsent.json"
    assert unsent.is_file()
    with locks.held("abc"):
        set_aside_held(tracker, "abc", locks, folder, "mine")
    assert not unsent.exists()
    assert _tags(tracker, run)["kind"] == "run"
    assert set(tracker.settled("config_key", ["abc"])) == {"abc"}
