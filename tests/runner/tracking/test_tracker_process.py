"""A tracker in another process does what one in this process does."""

import inspect
import os
import pickle
import shutil
import signal
from collections.abc import Iterator
from multiprocessing import active_children
from pathlib import Path

import pytest
from mlflow import MlflowClient

from fxpart.errors import InfeasibleError
from runner.config.sections import TrackingConfig
from runner.errors import TrackingError
from runner.tracking.mlflow_store import StoreError
from runner.tracking.mlflow_tracker import MlflowTracker
from runner.tracking.tracker import Tracker
from runner.tracking.tracker_process import TrackerProcess
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
    # Those of this module's fixtures are not those of a test.
    environment = os.environ.pop("MLFLOW_TRACKING_URI", None)
    opened = TrackerProcess(TrackingConfig(), root)
    if environment is not None:
        os.environ["MLFLOW_TRACKING_URI"] = environment
    opened.wait_until_open()
    yield opened
    for child in active_children():
        child.terminate()


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


def test_an_answer_left_by_an_interrupt_is_not_that_of_the_next_call(
    process: TrackerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(_: int) -> object:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(process, "_answer", interrupted)
        with pytest.raises(KeyboardInterrupt):
            process.runs({"kind": "run"})
    assert process.read_artifact(process.start_sweep("s"), "missing") is None


def test_an_interrupt_of_the_terminal_is_left_to_this_process(process: TrackerProcess) -> None:
    for child in active_children():
        assert child.pid is not None
        os.kill(child.pid, signal.SIGINT)
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
    process = TrackerProcess(TrackingConfig(), tmp_path)
    with pytest.raises(TrackingError) as there:
        process.wait_until_open()
    assert str(there.value) == str(here.value)


def test_a_run_stays_in_its_folder_if_the_process_dies(root: Path, tmp_path: Path) -> None:
    process = TrackerProcess(TrackingConfig(), root)
    with process.start("kept", {"n": 7}, folder=tmp_path) as log:
        for child in active_children():
            child.kill()
            child.join()
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


def test_the_error_of_a_store_is_the_same_after_pickling() -> None:
    error = StoreError("it is gone", "try again", is_gone=False)
    copy = pickle.loads(pickle.dumps(error))
    assert (str(copy), copy.what, copy.is_gone) == (str(error), "it is gone", False)
