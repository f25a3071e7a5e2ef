"""Runs at a real `mlflow server`, which is killed in the middle of one and restarted."""

import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
from mlflow import MlflowClient

from benchmarks.mlflow_server import Served
from runner import send
from runner.config.schema import TrackingConfig
from runner.job.identity import JobIdentity, SweepIds
from runner.job.job import run_job
from runner.job.rerun import rerun
from runner.tracking import mlflow_tracker
from runner.tracking.mlflow_runs import FoundRun, find_run
from runner.tracking.mlflow_tracker import MlflowTracker
from runner.tracking.open_tracker import open_tracker
from runner.tracking.unsent import send_unsent, unsent_files
from tests.runner.command import OWN, SMALL
from tests.runner.composed import read
from tests.runner.job.test_rerun_inputs import (
    CHOICES,
    FILES,
    asked_again,
    newest,
    ran,
    write_files,
)
from tests.runner.sweep.sweeping import sweep

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:mlflow")


KILLS = """
import os, signal
import tiny

def build(batch_size, dtype, group=0):
    os.killpg(group, signal.SIGKILL)
    return tiny.build(batch_size, dtype, width=32)
"""


@pytest.fixture(scope="module")
def server(
    new_forkserver: None,
    empty_store: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("served")
    served = Served(folder, Path(shutil.copy(empty_store, folder)))
    with patch.dict(os.environ):
        # It is tried once more, not for seconds.
        os.environ["MLFLOW_HTTP_REQUEST_MAX_RETRIES"] = "1"
        served.start()
        try:
            yield served
        finally:
            served.kill()


def _log_one(tracker: MlflowTracker, job: Path) -> str:
    """Log a run that is too large for one request, and check all of it."""
    params = {f"p{index}": str(index) for index in range(150)}
    with tracker.start("whole", params, {"config_key": "k0"}, folder=job) as run:
        run.log(
            metrics={f"m{index}": index / 3 for index in range(900)},
            series={"memory_gib": [(step, float(step)) for step in range(100)]},
            tables={"devices": {"device": [0]}},
            artifacts_dir=job,
        )
    assert run.problem is None
    client = MlflowClient(tracker.uri)
    kept = client.get_run(str(run.run_id))
    assert kept.info.artifact_uri.startswith("mlflow-artifacts:")
    assert kept.data.params == params
    assert kept.data.metrics == {f"m{i}": i / 3 for i in range(900)} | {"memory_gib": 99.0}
    files = [item.path for item in client.list_artifacts(str(run.run_id))]
    assert files == ["config", "devices.json", "result.json"]
    return str(run.run_id)


def test_a_killed_server_loses_and_doubles_no_result(
    server: Served,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    jobs = [tmp_path / "outputs" / name for name in ("0", "1", "2")]
    for job in jobs:
        (job / "config").mkdir(parents=True)
        for name in ("result.json", "config/resolved.yaml"):
            (job / name).write_text(name)
    config = TrackingConfig(uri=server.uri, experiment="served")
    tracker = MlflowTracker(config, tmp_path)
    whole = _log_one(tracker, jobs[0])
    with tracker.start("killed", {"p": 1}, {"config_key": "k1"}, folder=jobs[1]) as run:
        server.kill()
        run.log(metrics={"latency_ms": 1.5}, artifacts_dir=jobs[1])
    assert run.problem is not None
    # A connection may be open as the server dies.
    ends = "Connection refused|Connection reset by peer|Remote end closed connection.*"
    assert re.search(f"{server.uri} failed: ({ends}); the run is kept in", run.problem)
    with tracker.start("never there", {"p": 2}, {"config_key": "k2"}, folder=jobs[2]) as never:
        never.log(metrics={"latency_ms": 2.5})
    assert unsent_files(tmp_path) == [job / "unsent.json" for job in jobs[1:]]

    monkeypatch.setattr("sys.argv", ["send", "--uri", server.uri])
    assert send.main() == 2
    assert "2 runs could not be sent: " in capsys.readouterr().err
    server.start()
    assert send.main() == 0
    assert capsys.readouterr().out == "sent 2 runs\n"
    assert unsent_files(tmp_path) == []

    monkeypatch.setattr(mlflow_tracker, "_PAUSE_S", 0.0)
    again = MlflowTracker(config, tmp_path)
    settled = again.settled("config_key", [f"k{number}" for number in range(20)])
    assert {key: logged.name for key, logged in settled.items()} == {
        "k0": "whole",
        "k1": "killed",
        "k2": "never there",
    }
    assert (settled["k0"].run_id, settled["k1"].run_id) == (whole, run.run_id)
    assert settled["k1"].metrics == {"latency_ms": 1.5}
    assert len(again.runs({"kind": "run"})) == 3
    elsewhere = TrackingConfig(uri=server.uri, experiment="other")
    assert find_run(elsewhere, tmp_path, whole[:12]) == FoundRun(whole, "served")
    files = MlflowClient(server.uri).list_artifacts(str(run.run_id))
    assert [item.path for item in files] == ["config", "result.json"]
    page = again.comparison_page()
    assert page is not None
    assert page.command is None
    assert page.url.startswith(f"{server.uri}/#/experiments/")


def test_a_sweep_with_a_killed_server_gives_advice_and_continues(
    server: Served,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setattr(mlflow_tracker, "_PAUSE_S", 0.0)
    (folder / "kills.py").write_text(KILLS)
    swept = ["model=custom", "model.name=tiny", "reserve=none", SMALL, f"tracking.uri={server.uri}"]
    swept += [f"+model.factory_args.group=0,{server.group}", "capture.use_cache=false"]
    swept += [
        "model.factory=tiny:grouped,kills:build",
        "zip=[model.factory,model.factory_args.group]",
    ]
    assert sweep(*swept) == 2
    shown, err = capsys.readouterr()
    assert "2 runs" in shown
    assert "* lowest latency" in shown
    assert "1 result could not be logged" in err
    assert f"python -m runner.send --uri {server.uri} outputs/sweeps/" in err
    server.kill()  # what is left of it
    server.start()
    monkeypatch.setattr("sys.argv", ["send", "--uri", server.uri])
    assert send.main() == 0
    tracker = MlflowTracker(TrackingConfig(uri=server.uri), folder)
    (parent,) = tracker.runs({"kind": "sweep"})
    assert parent.status == "FINISHED"
    runs = tracker.runs_of_sweep(parent.tags["sweep_id"])
    assert [logged.tags["outcome"] for logged in runs] == ["finished", "finished"]
    capsys.readouterr()
    assert sweep(*swept) == 0
    assert "2 of 2 jobs done (2 before)" in capsys.readouterr().err


def test_a_run_sent_later_has_its_files(
    server: Served,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setattr(mlflow_tracker, "_PAUSE_S", 0.0)
    write_files(folder)
    # An experiment of its own, whose files the server keeps.
    tracking = TrackingConfig(uri=server.uri, experiment="files")
    first, was = ran(folder, *FILES["mode.assignment"], tracking=tracking)
    assert first.error is None
    server.kill()
    unlogged = replace(read(*OWN, *FILES["mode.assignment"], "devices=2x0.04mb"), tracking=tracking)
    job = folder / "outputs" / "unsent"
    of_a_sweep = JobIdentity(CHOICES, (), job, folder, SweepIds("abcd", None))
    assert run_job(unlogged, of_a_sweep).status == "infeasible"
    assert unsent_files(folder) == [job / "unsent.json"]
    server.start()
    assert send_unsent(folder, open_tracker(tracking, folder)) == 1
    sent = newest(folder, tracking)
    assert sent.status == "FAILED"
    Path("plan.json").unlink()
    shutil.rmtree(folder / "outputs")
    elsewhere = (f"tracking.uri={server.uri}", "tracking.experiment=files")
    capfd.readouterr()
    for run_id, status in ((was.run_id, "finished"), (sent.run_id, "infeasible")):
        outcome = rerun(*asked_again(folder, run_id, run_id, *elsewhere))
        assert outcome.status == status
        shown, err = capfd.readouterr()
        assert "mode.assignment=plan.json is gone; read as the run has kept it" in shown
        assert f"rerun:     the same as {run_id} in " in shown
        assert "Downloading" not in err
    assert list((folder / "outputs").rglob("mlartifacts")) == []
