"""Runs outside of sweeps, and the runs whose process is killed."""

import json
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from unittest.mock import patch

import pytest

from fxpart.errors import CacheError
from runner.config.schema import TrackingConfig
from runner.job import attempts
from runner.job.attempts import at_work_alone, mark_cut_off_alone
from runner.job.locks import Locks
from runner.tracking import mlflow_tracker
from runner.tracking.open_tracker import open_tracker
from runner.tracking.tracker import LoggedRun, Tracker
from tests.runner.command import OWN, SMALL, run
from tests.runner.tracked import impatient

__all__ = ["impatient"]

AT_WORK = """
import json, time
from pathlib import Path
from runner.config.schema import TrackingConfig
from runner.job.attempts import at_work_alone
from runner.tracking import mlflow_tracker
from runner.tracking.open_tracker import open_tracker
with at_work_alone(open_tracker(TrackingConfig(), Path.cwd()), Path.cwd()) as tags:
    print(json.dumps(tags), flush=True)
    time.sleep(300)  # longer than the test: it is killed
"""

ENDLESS = """
import os
from mlflow import MlflowClient
from tiny import *
MlflowClient.set_terminated = lambda *_, **__: os._exit(9)  # the last that a run does
"""


@pytest.fixture
def tracker(store: Path, folder: Path) -> Tracker:
    return open_tracker(TrackingConfig(), folder)


def nowhere(folder: Path) -> Tracker:
    return open_tracker(TrackingConfig(name="none"), folder)


def only_run(tracker: Tracker) -> LoggedRun:
    (only,) = [run for kind in ("run", "cut_off") for run in tracker.runs({"kind": kind})]
    return only


def test_a_run_that_was_killed_is_marked_by_the_next_command(
    folder: Path, tracker: Tracker
) -> None:
    # Its model is not built when the graph is cached.
    done = run(folder, *OWN, SMALL, "model.factory=tiny:is_killed", "capture.use_cache=false")
    assert done.code == -9
    assert only_run(tracker).status == "RUNNING"
    with at_work_alone(tracker, folder):
        cut_off = only_run(tracker)
        assert (cut_off.status, cut_off.tags["kind"]) == ("KILLED", "cut_off")
        assert "its process ended" in cut_off.tags["error"]


def test_a_killed_run_with_its_result_in_the_store_is_ended(folder: Path, tracker: Tracker) -> None:
    (folder / "endless.py").write_text(ENDLESS)
    done = run(folder, *OWN, SMALL, "model.factory=endless:build", "capture.use_cache=false")
    assert done.code == 9
    before = only_run(tracker)
    assert (before.status, before.tags["outcome"]) == ("RUNNING", "finished")
    with at_work_alone(tracker, folder):
        now = only_run(tracker)
    assert (now.status, now.tags["kind"], "error" in now.tags) == ("FINISHED", "run", False)
    assert now.metrics == before.metrics != {}


def test_the_lock_of_a_run_is_held_while_it_is_marked(
    folder: Path, tracker: Tracker, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = []

    def mark(run_id: str, _: str) -> None:
        with Locks(folder).held(tracker.run(run_id).tags["lock"], wait=False) as is_free:
            free.append(is_free)

    monkeypatch.setattr(tracker, "mark_cut_off", mark)
    with at_work_alone(tracker, folder) as tags, tracker.start("ours", {}, tags):
        mark_cut_off_alone(tracker, folder)
        assert not free  # it is running, in this process
    with tracker.start("theirs", {}, tags):
        mark_cut_off_alone(tracker, folder)
    assert free == [False]


def test_a_run_in_progress_is_left_alone(folder: Path, tracker: Tracker) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", AT_WORK], cwd=folder, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    tags = json.loads(process.stdout.readline())
    with tracker.start("theirs", {}, tags):
        mark_cut_off_alone(tracker, folder)
        assert only_run(tracker).status == "RUNNING"
        process.kill()
        process.communicate()
        for locks in (_no_locks, _Without):  # nobody can tell whether it is running
            with patch.object(attempts, "Locks", locks):
                mark_cut_off_alone(tracker, folder)
            assert only_run(tracker).status == "RUNNING"
        mark_cut_off_alone(tracker, folder)
        assert only_run(tracker).status == "KILLED"


def test_a_run_started_elsewhere_is_left_alone(
    folder: Path, tracker: Tracker, tmp_path: Path
) -> None:
    with at_work_alone(tracker, tmp_path / "elsewhere") as tags:
        pass
    with tracker.start("theirs", {}, tags):
        mark_cut_off_alone(tracker, folder)
        assert only_run(tracker).status == "RUNNING"


def test_a_run_that_ended_without_the_store_is_sent(
    folder: Path, tracker: Tracker, monkeypatch: pytest.MonkeyPatch, impatient: None
) -> None:
    monkeypatch.setattr(mlflow_tracker, "_PAUSE_S", 0)
    job = folder / "outputs" / "job"
    with closing(sqlite3.connect(folder / "outputs" / "mlflow.db", isolation_level=None)) as store:
        with at_work_alone(tracker, folder) as tags, tracker.start("run", {}, tags, folder=job):
            store.execute("BEGIN IMMEDIATE")
        store.execute("ROLLBACK")
    assert (only_run(tracker).status, (job / "unsent.json").is_file()) == ("RUNNING", True)
    mark_cut_off_alone(tracker, folder)
    run_now = only_run(tracker)
    assert (run_now.status, run_now.tags["kind"]) == ("FINISHED", "run")
    assert "error" not in run_now.tags


def test_without_a_store_nothing_is_looked_up(tmp_path: Path) -> None:
    with at_work_alone(nowhere(tmp_path), tmp_path) as tags:
        assert tags == {}
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written_does_not_stop_a_run(
    tracker: Tracker, tmp_path: Path
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "outputs").write_text("a file, where the folder would be")
    with at_work_alone(tracker, elsewhere) as tags:
        assert tags == {}


def _no_locks(_: Path) -> Locks:
    raise CacheError("cannot be written")


class _Without(Locks):
    """On a file system without locks."""

    are_supported = False
