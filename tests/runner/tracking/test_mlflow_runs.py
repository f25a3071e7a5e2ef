"""The runs that the tracker finds and marks, in one real store."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import pytest
from mlflow import MlflowClient
from mlflow.entities import Metric

from fxpart.errors import InfeasibleError, SpecError
from runner.config.schema import TrackingConfig
from runner.tracking import mlflow_runs
from runner.tracking.mlflow_opening import Store
from runner.tracking.mlflow_runs import MlflowRuns
from runner.tracking.mlflow_tracker import MlflowTracker
from runner.tracking.open_tracker import open_tracker
from runner.tracking.store_tracker import StoreTracker
from runner.tracking.tracker import Runs, Tracker
from tests.runner.tracked import experiment_of

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:mlflow")


@pytest.fixture(scope="module")
def tracker(empty_store: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[MlflowTracker]:
    """One store for all tests here: each has names and keys of its own."""
    root = tmp_path_factory.mktemp("runs")
    (root / "outputs").mkdir()
    shutil.copy(empty_store, root / "outputs")
    with patch.dict(os.environ):
        os.environ.pop("MLFLOW_TRACKING_URI", None)
        opened = open_tracker(TrackingConfig(), root)
        assert isinstance(opened, MlflowTracker)
        yield opened


@pytest.fixture
def client(tracker: MlflowTracker) -> MlflowClient:
    return MlflowClient(tracker.uri)


@pytest.fixture
def runs(tracker: MlflowTracker, client: MlflowClient) -> MlflowRuns:
    return MlflowRuns(Store(client, tracker.uri, experiment_of(client).experiment_id))


@pytest.fixture
def word(request: pytest.FixtureRequest) -> str:
    """A word that no other test uses."""
    return str(request.node.name).replace("[", "-").replace("]", "")


def test_the_tracker_implements_every_query_of_runs() -> None:
    queries = {name for name in vars(Runs) if not name.startswith("_")}
    assert {"run", "runs", "settled", "mark_cut_off"} <= queries <= vars(MlflowRuns).keys()
    # Methods of trackers alone do not exist, rather than have no effect.
    assert not hasattr(MlflowRuns, "send")
    asked_of_trackers = {name for name in vars(Tracker) if not name.startswith("_")}
    assert "start" in asked_of_trackers <= vars(MlflowTracker).keys() | vars(StoreTracker).keys()


def _run(tracker: MlflowTracker, name: str, key: str, error: BaseException | None = None) -> str:
    """Log one run, ended by `error`, and return its id."""
    try:
        with tracker.start(name, {}, {"config_key": key}, "the-parent") as run:
            run.log(metrics={"latency_ms": 2.5})
            if error:
                raise error
    except (InfeasibleError, ZeroDivisionError, KeyboardInterrupt):
        pass
    return str(run.run_id)


def _running(tracker: MlflowTracker, client: MlflowClient, key: str) -> str:
    """Leave a run as a killed process leaves it."""
    run_id = tracker.start_sweep("killed", {"kind": "run", "config_key": key})
    client.set_tag(run_id, "mlflow.parentRunId", "the-parent")
    return run_id


@pytest.fixture(params=["read", "one_by_one"])
def many_values(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How runs with one of many values are found: in a small store, and in a large one."""
    if request.param == "one_by_one":
        monkeypatch.setattr(mlflow_runs, "_READ_PER_VALUE", 0)
    return str(request.param)


@pytest.mark.usefixtures("many_values")
def test_the_settled_run_is_the_newest_with_a_result(
    tracker: MlflowTracker, runs: MlflowRuns, word: str
) -> None:
    keys = [f"{word}{number}" for number in range(40)]  # more than are searched for individually
    _run(tracker, "old", keys[0])
    newest = _run(tracker, "new", keys[0])
    infeasible = _run(tracker, "does not fit", keys[1], InfeasibleError("too small"))
    _run(tracker, "crashed", keys[2], ZeroDivisionError())
    _run(tracker, "stopped", keys[3], KeyboardInterrupt())
    _run(tracker, "not asked for", f"{word}-else")
    settled = runs.settled("config_key", keys)
    assert {key: run.run_id for key, run in settled.items()} == {
        keys[0]: newest,
        keys[1]: infeasible,
    }
    assert (settled[keys[0]].name, settled[keys[0]].status) == ("new", "FINISHED")
    assert settled[keys[0]].metrics == {"latency_ms": 2.5}
    assert settled[keys[0]].tags["outcome"] == "finished"
    assert settled[keys[1]].metrics == {"latency_ms": 2.5, "feasible": 0.0}
    assert settled[keys[1]].tags["outcome"] == "infeasible"
    assert runs.settled("config_key", [keys[0]]).keys() == {keys[0]}
    assert runs.settled("config_key", []) == {}


def test_a_run_killed_just_before_its_end_is_settled_and_ended(
    tracker: MlflowTracker, client: MlflowClient, runs: MlflowRuns, word: str
) -> None:
    run_id = _running(tracker, client, word)
    client.set_tag(run_id, "outcome", "infeasible")
    assert runs.settled("config_key", [word])[word].run_id == run_id
    info = client.get_run(run_id).info
    assert info.status == "FAILED"
    assert info.end_time is not None


def test_a_result_of_a_process_that_died_is_not_unfinished(
    tracker: MlflowTracker, client: MlflowClient, runs: MlflowRuns, word: str
) -> None:
    run_id = _running(tracker, client, word)
    client.set_tag(run_id, "outcome", "finished")
    assert runs.unfinished("config_key", [word]) == []
    assert client.get_run(run_id).info.status == "FINISHED"


@pytest.mark.usefixtures("many_values")
def test_runs_without_a_result_are_unfinished(
    tracker: MlflowTracker, client: MlflowClient, runs: MlflowRuns, word: str
) -> None:
    keys = [f"{word}{number}" for number in range(40)]
    _run(tracker, "done", keys[0])
    _run(tracker, "does not fit", keys[1], InfeasibleError("too small"))
    expected = [
        _run(tracker, "crashed", keys[2], ZeroDivisionError()),
        _run(tracker, "stopped", keys[3], KeyboardInterrupt()),
        _running(tracker, client, keys[4]),
    ]
    unfinished = runs.unfinished("config_key", keys)
    assert sorted(run.run_id for run in unfinished) == sorted(expected)
    assert {run.status for run in unfinished} == {"FAILED", "KILLED", "RUNNING"}
    assert [run.start_ms for run in unfinished] == sorted(run.start_ms for run in unfinished)


def test_an_interrupted_run_leaves_its_sweep_and_is_kept(
    tracker: MlflowTracker, client: MlflowClient, runs: MlflowRuns, word: str
) -> None:
    run_id = _running(tracker, client, word)
    for _ in range(2):  # a second time changes nothing
        runs.mark_cut_off(run_id, "the process died")
        kept = client.get_run(run_id)
        assert kept.info.status == "KILLED"
        assert (
            kept.data.tags.items()
            >= {
                "kind": "cut_off",
                "outcome": "cut_off",
                "error": "the process died",
                "cut_off_from": "the-parent",
            }.items()
        )
        assert "mlflow.parentRunId" not in kept.data.tags
    assert runs.unfinished("config_key", [word]) == []


def test_an_interrupted_mark_is_completed(
    tracker: MlflowTracker, client: MlflowClient, runs: MlflowRuns, word: str
) -> None:
    run_id = _running(tracker, client, word)
    with (
        patch.object(client, "set_terminated", side_effect=KeyboardInterrupt),
        pytest.raises(KeyboardInterrupt),
    ):
        runs.mark_cut_off(run_id, "the process died")
    assert [run.run_id for run in runs.unfinished("config_key", [word])] == [run_id]
    runs.mark_cut_off(run_id, "the process died")
    tags = client.get_run(run_id).data.tags
    assert (tags["kind"], tags["cut_off_from"]) == ("cut_off", "the-parent")


def test_a_repeated_failed_run_leaves_its_sweep(
    tracker: MlflowTracker, client: MlflowClient, runs: MlflowRuns, word: str
) -> None:
    run_id = _run(tracker, "crashed", word, ZeroDivisionError("by zero"))
    runs.supersede(run_id)
    kept = client.get_run(run_id)
    assert kept.info.status == "FAILED"
    assert kept.data.tags["kind"] == "superseded"
    assert kept.data.tags["superseded_in"] == "the-parent"
    assert kept.data.tags["error"] == "ZeroDivisionError: by zero"
    assert "mlflow.parentRunId" not in kept.data.tags


def test_runs_join_a_sweep_once(tracker: MlflowTracker, runs: MlflowRuns, word: str) -> None:
    first, second = _run(tracker, "first", word), _run(tracker, "second", word)
    alone = _run(tracker, "alone", word)
    runs.join_sweep([second, first], f"{word}a1")
    runs.join_sweep([first], f"{word}a12")
    runs.join_sweep([first, second], f"{word}a1")
    joined = runs.runs_of_sweep(f"{word}a1")
    assert {run.run_id for run in joined} == {first, second}
    assert [run.run_id for run in runs.runs_of_sweep(f"{word}a12")] == [first]
    assert tracker.run(first).tags["sweeps"] == f" {word}a1 {word}a12 "
    assert "sweeps" not in tracker.run(alone).tags
    runs.join_sweep([], "nobody")


def test_of_very_many_sweeps_the_first_are_listed(
    tracker: MlflowTracker, runs: MlflowRuns, word: str
) -> None:
    run_id = _run(tracker, "popular", word)
    with patch("runner.tracking.mlflow_runs._SWEEPS_CHARS", 40):
        for number in range(10):
            runs.join_sweep([run_id], f"sweep-{number}-{'x' * 6}")
    listed = tracker.run(run_id).tags["sweeps"]
    assert listed == " sweep-0-xxxxxx sweep-1-xxxxxx sweep-2-xxxxxx "


@pytest.mark.parametrize("odd", ["a'b", 'a"b', "a'b\"c", "100 % _", "a\\b"])
def test_runs_are_found_by_any_value_of_a_tag(
    odd: str, tracker: MlflowTracker, runs: MlflowRuns, word: str
) -> None:
    run_id = tracker.start_sweep("odd", {"note": odd, "of": word})
    tracker.start_sweep("another", {"note": "a-b", "of": word})
    assert [run.run_id for run in runs.runs({"note": odd, "of": word})] == [run_id]


def test_many_runs_come_page_by_page_oldest_first(
    tracker: MlflowTracker,
    client: MlflowClient,
    runs: MlflowRuns,
    word: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(mlflow_runs, "_PAGE", 2)
    ids = [tracker.start_sweep(str(number), {"of": word}) for number in range(5)]
    deleted = tracker.start_sweep("deleted", {"of": word})
    client.delete_run(deleted)
    listed = runs.runs({"of": word})
    assert sorted(run.run_id for run in listed) == sorted(ids)
    times = [(run.start_ms, run.run_id) for run in listed]
    assert times == sorted(times)


def test_a_run_is_found_by_its_id(tracker: MlflowTracker, client: MlflowClient, word: str) -> None:
    run_id = _run(tracker, word, word)
    client.log_batch(run_id, metrics=[Metric("s", value, 1, value) for value in (1, 3, 2)])
    run = tracker.run(run_id)
    assert (run.run_id, run.name, run.metrics["s"]) == (run_id, word, 3.0)
    with pytest.raises(SpecError, match=r"no run 'nobody' at sqlite:///.*; .* tracking.uri="):
        tracker.run("nobody")


def test_a_sweep_is_reopened_and_added_to(
    tracker: MlflowTracker, client: MlflowClient, word: str, tmp_path: Path
) -> None:
    (tmp_path / "report.html").write_text("<html/>")
    parent = tracker.start_sweep("sweep", {"sweep_id": word})
    tracker.finish_sweep(parent, "KILLED")
    tracker.reopen_sweep(parent)
    assert client.get_run(parent).info.status == "RUNNING"
    tracker.log_sweep(
        parent,
        metrics={"jobs": 3, "best": float("inf")},
        tags={"best_run": "abc"},
        files=[tmp_path / "report.html"],
    )
    tracker.finish_sweep(parent)
    kept = client.get_run(parent)
    assert kept.info.status == "FINISHED"
    assert kept.data.metrics == {"jobs": 3.0}
    assert kept.data.tags["best_run"] == "abc"
    assert [item.path for item in client.list_artifacts(parent)] == ["report.html"]
    tracker.log_sweep(None, tags={"to": "nobody"})
    tracker.finish_sweep(None)
