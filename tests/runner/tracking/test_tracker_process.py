"""A tracker in another process does what one in this process does."""

import inspect
import os
import pickle
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from unittest.mock import Mock, patch

import pytest
from mlflow import MlflowClient

from fxpart.errors import InfeasibleError
from runner.config.schema import TrackingConfig
from runner.errors import TrackingError
from runner.tracking.mlflow_store import StoreError
from runner.tracking.mlflow_tracker import MlflowTracker
from runner.tracking.tracker import Tracker
from runner.tracking.tracker_process import TrackerProcess, _answer_of
from runner.tracking.unsent import UNSENT_FILE, send_unsent

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:mlflow")


@pytest.fixture(scope="module")
def root(empty_store: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("process")
    (folder / "outputs").mkdir()
    shutil.copy(empty_store, folder / "outputs")
    return folder


@pytest.fixture(scope="module")
def process(root: Path) -> Iterator[TrackerProcess]:
    """One for all tests: it takes seconds to start."""
    with patch.dict(os.environ):
        os.environ.pop("MLFLOW_TRACKING_URI", None)
        opened = TrackerProcess(TrackingConfig(), root)
    with opened:
        assert opened.is_open()
        yield opened
    assert opened._process.returncode == 0


def _client(root: Path) -> MlflowClient:
    return MlflowClient(f"sqlite:///{root}/outputs/mlflow.db")


def test_every_method_of_a_tracker_reaches_the_other_process() -> None:
    names = {name for name, _ in inspect.getmembers(Tracker) if not name.startswith("_")}
    assert {name for name in names if name not in vars(TrackerProcess)} == {"start"}


def test_a_run_is_logged_as_in_this_process(process: TrackerProcess, root: Path) -> None:
    (root / "made").mkdir()
    (root / "made" / "plan.json").write_text("{}")
    here = MlflowTracker(TrackingConfig(), root)
    assert process.place == here.place
    logged = []
    for tracker in (process, here):
        with tracker.start("named", {"n": 1}, {"tag": "x"}, folder=root / "made") as log:
            assert log.run_id is not None
            assert _client(root).get_run(log.run_id).data.params == {"n": "1"}
            log.log(metrics={"m": 2.5}, series={"s": [(0, 1.0)]}, artifacts_dir=root / "made")
        assert log.problem is None
        run = _client(root).get_run(str(log.run_id))
        files = [file.path for file in _client(root).list_artifacts(str(log.run_id))]
        tags = {k: v for k, v in run.data.tags.items() if k != "record_id"}
        logged.append((run.info.status, run.data.params, run.data.metrics, tags, files))
    assert logged[0] == logged[1]
    assert logged[0][0] == "FINISHED"
    found = [run.run_id for run in process.runs({"tag": "x"})]
    assert found == [run.run_id for run in here.runs({"tag": "x"})]
    assert len(found) == 2


def test_an_error_of_the_job_marks_the_run(process: TrackerProcess, root: Path) -> None:
    with pytest.raises(InfeasibleError), process.start("large", {}, folder=root) as log:
        raise InfeasibleError("too large")
    run = _client(root).get_run(str(log.run_id))
    assert run.info.status == "FAILED"
    assert run.data.tags["error"] == "too large"


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_signals_to_all_processes_are_left_to_this_one(
    process: TrackerProcess, sent: signal.Signals
) -> None:
    process._process.send_signal(sent)
    assert process.runs({"kind": "nothing"}) == []


def test_errors_come_with_their_messages(process: TrackerProcess, root: Path) -> None:
    with pytest.raises(TrackingError, match="failed"):
        process.reopen_sweep("no such run")
    # A bug has its traceback.
    with pytest.raises(TypeError) as raised:
        process.reopen_sweep()
    assert "Traceback" in "".join(raised.value.__notes__)


def test_a_store_that_does_not_work_is_refused(tmp_path: Path) -> None:
    (tmp_path / "outputs").mkdir()
    (tmp_path / "outputs" / "mlflow.db").mkdir()
    with pytest.raises(TrackingError) as here:
        MlflowTracker(TrackingConfig(), tmp_path)
    with (
        TrackerProcess(TrackingConfig(), tmp_path) as process,
        pytest.raises(TrackingError) as there,
    ):
        process.is_open()
    assert str(there.value) == str(here.value)


def _kill(process: TrackerProcess) -> None:
    process._process.kill()
    process._process.wait()


def test_a_run_stays_in_its_folder_if_the_process_dies(root: Path, tmp_path: Path) -> None:
    with (
        TrackerProcess(TrackingConfig(), root) as process,
        process.start("kept", {"n": 7}, folder=tmp_path) as log,
    ):
        _kill(process)
        log.log(metrics={"m": 1.0})
    assert "the process that logs has ended" in str(log.problem)
    assert (tmp_path / UNSENT_FILE).is_file()
    here = MlflowTracker(TrackingConfig(), root)
    assert send_unsent(tmp_path, here) == 1
    run = _client(root).get_run(str(log.run_id))
    assert (run.info.status, run.data.params, run.data.metrics) == (
        "FINISHED",
        {"n": "7"},
        {"m": 1.0},
    )


def test_a_process_that_dies_before_the_store_is_open_is_no_fault_of_the_store(root: Path) -> None:
    with TrackerProcess(TrackingConfig(), root) as process:
        _kill(process)
        assert not process.is_open()


def test_no_call_takes_the_answer_to_an_interrupted_one(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with TrackerProcess(TrackingConfig(), root) as process:
        with monkeypatch.context() as interrupted:
            interrupted.setattr(Connection, "recv", Mock(side_effect=KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                process.is_open()
        with pytest.raises(StoreError, match="has ended"):
            process.runs({})
        _kill(process)


def test_a_script_is_not_run_again(root: Path) -> None:
    # It has no main guard, as in a notebook.
    (root / "script.py").write_text(
        "from pathlib import Path\n"
        "from runner.config.schema import TrackingConfig\n"
        "from runner.tracking.tracker_process import TrackerProcess\n"
        "print('once')\n"
        "with TrackerProcess(TrackingConfig(), Path.cwd()) as process:\n"
        "    assert process.is_open()\n"
    )
    done = subprocess.run(
        [sys.executable, "script.py"], cwd=root, capture_output=True, text=True, check=True
    )
    assert (done.stdout, done.stderr) == ("once\n", "")


class _UnpicklableError(Exception):
    def __init__(self, _: int, __: int) -> None:
        super().__init__("two numbers")


def test_an_error_that_cannot_be_pickled_has_its_text() -> None:
    _, error = _answer_of(lambda: int("x"))
    assert isinstance(error, ValueError)

    def fail() -> None:
        raise _UnpicklableError(1, 2)

    _, error = _answer_of(fail)
    assert isinstance(error, RuntimeError)
    assert "_UnpicklableError: two numbers" in str(error)


def test_the_error_of_a_store_is_the_same_after_pickling() -> None:
    error = StoreError("it is gone", "try again", is_gone=False)
    copy = pickle.loads(pickle.dumps(error))
    assert (str(copy), copy.what, copy.is_gone) == (str(error), "it is gone", False)
