"""Runs that are no job of a sweep, and what becomes of those whose process is killed."""

import subprocess
import sys
from pathlib import Path

import pytest

from fxpart.errors import CacheError
from runner.config.sections import TrackingConfig
from runner.job import attempts
from runner.job.attempts import at_work_alone, mark_cut_off_alone
from runner.job.locks import Locks
from runner.tracking.open_tracker import open_tracker
from runner.tracking.tracker import LoggedRun, Tracker
from tests.runner.command import OWN, SMALL, run

MARKS = Path("outputs") / ".alone"
AT_WORK = """
import sys, time
from pathlib import Path
from runner.config.sections import TrackingConfig
from runner.job.attempts import at_work_alone
from runner.tracking.open_tracker import open_tracker
with at_work_alone(open_tracker(TrackingConfig(), Path.cwd()), Path.cwd()) as tags:
    print(tags["alone"], flush=True)
    time.sleep(300)  # longer than the test: it is killed
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
        assert len(list((folder / MARKS).iterdir())) == 1
    assert not list((folder / MARKS).iterdir())


def test_a_run_at_work_is_left_alone(folder: Path, tracker: Tracker) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", AT_WORK], cwd=folder, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    name = process.stdout.readline().strip()
    with tracker.start("theirs", {}, {"alone": name}):
        mark_cut_off_alone(tracker, folder)
        assert only_run(tracker).status == "RUNNING"
        process.kill()
        process.communicate()
        mark_cut_off_alone(nowhere(folder), folder)  # another store: not its run
        assert (folder / MARKS / name).exists()
        mark_cut_off_alone(tracker, folder)
        assert only_run(tracker).status == "KILLED"
    assert not (folder / MARKS / name).exists()


def test_where_nothing_is_kept_nothing_is_found_out(tmp_path: Path) -> None:
    with at_work_alone(nowhere(tmp_path), tmp_path) as tags:
        assert tags == {}
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written_keeps_no_run_from_being_done(
    tracker: Tracker, tmp_path: Path
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "outputs").write_text("a file, where the folder would be")
    with at_work_alone(tracker, elsewhere) as tags:
        assert tags == {}


def test_a_mark_that_cannot_be_written_leaves_no_lock_behind(
    folder: Path, tracker: Tracker, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / MARKS).write_text("a file, where the folder of marks would be")
    monkeypatch.setattr("secrets.token_hex", lambda _: "known")
    with at_work_alone(tracker, folder) as tags:
        assert tags == {}
    ask = "from pathlib import Path; from runner.job.locks import Locks; import sys"
    ask += "; sys.exit(Locks(Path.cwd()).is_held_elsewhere('alone known'))"
    assert subprocess.run([sys.executable, "-c", ask], cwd=folder, check=False).returncode == 0


def test_marks_that_say_nothing_are_left_alone(
    folder: Path, tracker: Tracker, monkeypatch: pytest.MonkeyPatch
) -> None:
    with at_work_alone(tracker, folder) as tags:
        text = (folder / MARKS / tags["alone"]).read_text()
    marks = {"damaged": b"\xff", ".0_1_2.tmp": text.encode(), "of-other-locks": text[:-1].encode()}
    for name, content in marks.items():
        (folder / MARKS / name).write_bytes(content)
    mark_cut_off_alone(tracker, folder)
    assert {mark.name for mark in (folder / MARKS).iterdir()} == set(marks)
    (folder / MARKS / "dead").write_text(text)
    for locks in (_no_locks, _Without):  # nobody can tell whether it is at work
        monkeypatch.setattr(attempts, "Locks", locks)
        mark_cut_off_alone(tracker, folder)
        assert (folder / MARKS / "dead").exists()
    monkeypatch.undo()
    mark_cut_off_alone(tracker, folder)
    assert not (folder / MARKS / "dead").exists()


def _no_locks(_: Path) -> Locks:
    raise CacheError("cannot be written")


class _Without(Locks):
    """On a file system that has none."""

    are_supported = False
