"""Runs that cannot be logged stay on disk, and are logged once."""

import fcntl
import json
import os
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
from mlflow import MlflowClient

from fxpart.errors import InfeasibleError, SpecError
from runner import send
from runner.config.schema import TrackingConfig
from runner.errors import TrackingError
from runner.tracking import mlflow_tracker
from runner.tracking.mlflow_tracker import MlflowTracker
from runner.tracking.open_tracker import open_tracker
from runner.tracking.tracker import Tracker, UnsentRun
from runner.tracking.unsent import (
    read_unsent,
    send_file,
    send_unsent,
    unsent_files,
    write_unsent,
)
from tests.runner.tracked import impatient

__all__ = ["impatient"]

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:mlflow")


@pytest.fixture
def root(empty_store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A user's folder with an empty store."""
    (tmp_path / "outputs" / "job").mkdir(parents=True)
    shutil.copy(empty_store, tmp_path / "outputs")
    monkeypatch.chdir(tmp_path)
    with patch.dict(os.environ):
        os.environ.pop("MLFLOW_TRACKING_URI", None)
        yield tmp_path


@pytest.fixture
def tracker(root: Path, impatient: None) -> MlflowTracker:
    """A tracker with a short timeout for a store that another process has locked."""
    opened = open_tracker(TrackingConfig(), root)
    assert isinstance(opened, MlflowTracker)
    return opened


def _kept(root: Path) -> list[tuple[str, str, dict[str, float]]]:
    client = MlflowClient(f"sqlite:///{root}/outputs/mlflow.db")
    experiment = client.get_experiment_by_name("fxpart")
    assert experiment is not None
    runs = client.search_runs([experiment.experiment_id])
    return [(run.info.run_name, run.info.status, run.data.metrics) for run in runs]


@contextmanager
def _locked(root: Path) -> Iterator[None]:
    """Make the store unwritable, like a broken one."""
    with closing(sqlite3.connect(root / "outputs" / "mlflow.db", isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        yield
        other.execute("ROLLBACK")


def _run(name: str = "run", uri: str = "") -> UnsentRun:
    return UnsentRun(
        record_id=f"record-{name}",
        name=name,
        uri=uri,
        experiment="fxpart",
        status="FINISHED",
        start_ms=1000,
        end_ms=2000,
        params={"mode": "kl_based"},
        tags={"kind": "run", "outcome": "finished", "record_id": f"record-{name}"},
        metrics={"latency_ms": 1.5},
        series={"memory_gib": [(0, 1.0), (7, 2.0)]},
        tables={"devices": {"device": [0, 1]}},
    )


def test_a_run_is_read_as_written(tmp_path: Path) -> None:
    path = write_unsent(tmp_path / "job", _run())
    assert path == tmp_path / "job" / "unsent.json"
    again = write_unsent(tmp_path / "again", read_unsent(path))
    assert again.read_text() == path.read_text()
    assert read_unsent(path).metrics == {"latency_ms": 1.5}
    assert [list(point) for point in read_unsent(path).series["memory_gib"]] == [[0, 1.0], [7, 2.0]]


def test_an_incomplete_file_is_refused(tmp_path: Path) -> None:
    path = write_unsent(tmp_path, _run())
    document = json.loads(path.read_text())
    path.write_text(json.dumps({**document, "version": 2}))
    with pytest.raises(SpecError, match="version 2, this fxpart reads up to 1"):
        read_unsent(path)
    del document["metrics"]
    path.write_text(json.dumps(document))
    with pytest.raises(SpecError, match=r"unsent.json is damaged \(no metrics\)"):
        read_unsent(path)


@pytest.mark.parametrize(
    ("part", "value"),
    [
        ("artifacts", "../../.."),
        ("artifacts", "/etc"),
        ("artifacts", "inner/../.."),
        ("artifacts", 7),
        ("status", "RUNNING"),
        ("status", None),
        ("tags", {"kind": "run"}),
        ("tags", {"outcome": 1}),
        ("params", ["a"]),
        ("uri", None),
        ("record_id", 3),
        ("end_ms", "now"),
    ],
)
def test_a_file_with_foreign_contents_is_refused(
    root: Path, tracker: MlflowTracker, part: str, value: object
) -> None:
    path = write_unsent(root / "outputs" / "job", _run("one", tracker.uri))
    path.write_text(json.dumps({**json.loads(path.read_text()), part: value}))
    with pytest.raises(SpecError, match=rf"unsent.json is damaged \({part}: "):
        read_unsent(path)
    assert send_unsent(root, tracker) == 0
    assert _kept(root) == []


def test_links_are_not_sent(root: Path, tracker: MlflowTracker) -> None:
    job = root / "outputs" / "job"
    write_unsent(job, replace(_run("one", tracker.uri), artifacts="."))
    (root / "secret").write_text("of somebody else")
    (job / "figure.svg").symlink_to(root / "secret")
    with pytest.raises(SpecError, match=r"figure.svg is a link, which is not sent"):
        send_file(job / "unsent.json", lambda _: tracker)
    assert _kept(root) == []


def test_files_are_found_except_those_kept_by_mlflow(tmp_path: Path) -> None:
    for name in ("sweeps/b/1_x", "sweeps/a", "mlartifacts/1/artifacts"):
        write_unsent(tmp_path / name, _run())
    folders = [str(path.parent.relative_to(tmp_path)) for path in unsent_files(tmp_path)]
    assert folders == ["sweeps/a", "sweeps/b/1_x"]


def test_a_store_that_goes_away_loses_no_result(root: Path, tracker: MlflowTracker) -> None:
    job, after = root / "outputs" / "job", root / "outputs" / "after"
    (job / "result.json").write_text("{}")
    after.mkdir()
    with _locked(root):
        with tracker.start("lost", {"mode": "kl_based"}, {"config_key": "k"}, folder=job) as run:
            run.log(metrics={"latency_ms": 2.5}, artifacts_dir=job)
        # The next one does not even try.
        with (
            patch.object(mlflow_tracker, "make_run", side_effect=AssertionError),
            pytest.raises(InfeasibleError),
            tracker.start("after", {}, {"config_key": "n"}, folder=after) as next_run,
        ):
            raise InfeasibleError("too small")
    assert (run.run_id, next_run.run_id) == (None, None)
    assert unsent_files(root) == [after / "unsent.json", job / "unsent.json"]
    assert run.problem == (
        f"tracking at sqlite:///{root}/outputs/mlflow.db failed: database is locked;"
        " the run is kept in outputs/job/unsent.json; send it with `python -m runner.send`"
    )
    assert next_run.problem is not None
    assert "locked" in next_run.problem
    with pytest.raises(TrackingError, match="locked"):
        tracker.settled("config_key", ["k"])
    _send_what_is_left(root)


def _send_what_is_left(root: Path) -> None:
    again = MlflowTracker(TrackingConfig(), root)
    assert send_unsent(root / "outputs", Tracker()) == 0
    assert send_unsent(root / "outputs", again) == 2
    assert send_unsent(root / "outputs", again) == 0
    assert sorted(_kept(root)) == [
        ("after", "FAILED", {"feasible": 0.0}),
        ("lost", "FINISHED", {"latency_ms": 2.5}),
    ]
    settled = again.settled("config_key", ["k", "n"])
    assert settled.keys() == {"k", "n"}
    client = MlflowClient(again.uri)
    assert [item.path for item in client.list_artifacts(settled["k"].run_id)] == ["result.json"]


def test_a_run_created_before_the_store_went_away_is_completed(
    root: Path, tracker: MlflowTracker
) -> None:
    job = root / "outputs" / "job"
    locked = ExitStack()
    with locked, tracker.start("lost", {}, folder=job) as run:
        run.log(metrics={"latency_ms": 2.5})
        known = run.run_id
        locked.enter_context(_locked(root))
    assert read_unsent(job / "unsent.json").run_id == known
    assert _kept(root) == [("lost", "RUNNING", {})]
    assert send_unsent(root / "outputs", MlflowTracker(TrackingConfig(), root)) == 1
    assert _kept(root) == [("lost", "FINISHED", {"latency_ms": 2.5})]


def test_artifacts_that_cannot_be_kept_lose_no_result(root: Path, tracker: MlflowTracker) -> None:
    (root / "outputs" / "mlartifacts").write_text("a file where the folder should be")
    with tracker.start("run", {}, folder=root / "outputs" / "job") as run:
        run.log(metrics={"latency_ms": 2.5}, tables={"devices": {"device": [0]}})
    assert run.problem is not None
    assert "mlartifacts" in run.problem
    assert _kept(root) == [("run", "RUNNING", {})]
    (root / "outputs" / "mlartifacts").unlink()
    assert send_unsent(root / "outputs", MlflowTracker(TrackingConfig(), root)) == 1
    assert _kept(root) == [("run", "FINISHED", {"latency_ms": 2.5})]


def test_a_store_that_returns_is_used_after_a_pause(
    root: Path, tracker: MlflowTracker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mlflow_tracker, "_PAUSE_S", 0.0)
    with ExitStack() as stack:
        stack.enter_context(_locked(root))
        with tracker.start("back", {"mode": "single"}, folder=root / "outputs" / "job") as run:
            assert run.run_id is None
            run.log(metrics={"latency_ms": 2.5})
            stack.close()
    assert (run.problem, unsent_files(root)) == (None, [])
    assert run.run_id is not None
    assert tracker.run(run.run_id).params == {"mode": "single"}
    assert _kept(root) == [("back", "FINISHED", {"latency_ms": 2.5})]


def test_without_a_folder_a_store_that_fails_is_an_error(
    root: Path, tracker: MlflowTracker
) -> None:
    with (
        _locked(root),
        pytest.raises(TrackingError, match="database is locked"),
        tracker.start("lost", {}),
    ):
        pass


def test_a_full_disk_as_well_is_reported(root: Path, tracker: MlflowTracker) -> None:
    (root / "file").write_text("where the folder should be")
    with _locked(root), tracker.start("lost", {}, folder=root / "file") as run:
        pass
    assert unsent_files(root) == []
    assert run.problem is not None
    assert "locked; cannot write" in run.problem


def test_a_job_of_a_sweep_starts_without_its_store(root: Path) -> None:
    (root / "outputs" / "mlflow.db").write_bytes(b"broken " * 10_000)
    with pytest.raises(TrackingError):
        open_tracker(TrackingConfig(), root)
    tracker = open_tracker(TrackingConfig(), root, must_answer=False)
    with tracker.start("job", {}, folder=root / "outputs" / "job"):
        pass
    assert unsent_files(root) == [root / "outputs" / "job" / "unsent.json"]
    assert tracker.comparison_page() is None


def test_a_run_is_sent_to_its_intended_store(root: Path, tracker: MlflowTracker) -> None:
    write_unsent(root / "outputs" / "job", _run(uri="http://somewhere.else:5000"))
    assert send_unsent(root / "outputs", tracker) == 0
    (root / "outputs" / "damaged").mkdir()
    (root / "outputs" / "damaged" / "unsent.json").write_text("{")
    write_unsent(root / "outputs" / "ours", _run("ours", tracker.uri))
    assert send_unsent(root / "outputs", tracker) == 1
    assert [name for name, *_ in _kept(root)] == ["ours"]
    assert len(unsent_files(root)) == 2


def test_a_killed_sender_leaves_no_second_run(root: Path, tracker: MlflowTracker) -> None:
    path = write_unsent(root / "outputs" / "job", _run(uri=tracker.uri))
    for step in ("runner.tracking.mlflow_tracker.fill_and_close", "pathlib.Path.unlink"):
        with patch(step, side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
            send_unsent(root / "outputs", tracker)
        assert path.exists()
    assert send_unsent(root / "outputs", tracker) == 1
    assert _kept(root) == [("run", "FINISHED", {"latency_ms": 1.5, "memory_gib": 2.0})]


def test_a_run_being_sent_by_another_process_is_left_to_it(
    root: Path, tracker: MlflowTracker
) -> None:
    path = write_unsent(root / "outputs" / "job", _run(uri=tracker.uri))
    with path.open("rb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        assert send_unsent(root / "outputs", tracker) == 0
    assert send_unsent(root / "outputs", tracker) == 1
    assert not path.exists()


def _send(*arguments: str, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr("sys.argv", ["send", *arguments])
    return send.main()


def test_the_command_sends_all(
    root: Path,
    tracker: MlflowTracker,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert _send(monkeypatch=monkeypatch) == 0
    assert capsys.readouterr().out == "no unsent runs below outputs\n"
    (root / "tiny").write_text("a file where the folder should be")
    write_unsent(root / "outputs" / "job", _run("one", tracker.uri))
    broken = write_unsent(root / "outputs" / "two", _run("two", "sqlite:///tiny/x.db"))
    assert _send(monkeypatch=monkeypatch) == 2
    captured = capsys.readouterr()
    assert captured.out == "sent 1 run\n"
    assert captured.err.startswith("error: 1 run could not be sent: run two is meant for ")
    assert captured.err.endswith("; add --uri sqlite:///tiny/x.db to send it there\n")
    assert captured.err.count("\n") == 1
    assert broken.exists()
    assert _send("outputs", "--uri", "sqlite:///outputs/mlflow.db", monkeypatch=monkeypatch) == 0
    assert capsys.readouterr().out == "sent 1 run\n"
    assert sorted(name for name, *_ in _kept(root)) == ["one", "two"]
    assert unsent_files(root) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], r"there is no folder nowhere; give python -m runner.send the one"),
        (["--url"], r"unrecognized arguments: --url; see python -m runner.send --help"),
    ],
)
def test_unknown_arguments_are_refused(arguments: list[str], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        send.parsed(arguments)
