"""A sweep read from a real store."""

import json
import time
from pathlib import Path

import pytest

from fxpart.errors import InfeasibleError, SpecError
from runner.config.schema import TrackingConfig
from runner.errors import TrackingError
from runner.report.from_store import (
    all_runs,
    chosen_sweep,
    config_value,
    sweep_from_store,
    sweeps_of,
)
from runner.report.sweep_data import LATEST
from runner.tracking.mlflow_runs import open_stored
from runner.tracking.open_tracker import open_tracker
from runner.tracking.tracker import Tracker

CHOICES = {"model": "gpt2", "mode": "kl_based", "devices": "2x16gb", "transfer_rate": "pcie4"}


def log(
    tracker: Tracker, key: str, latency_ms: float | None, *sweeps: str, **tags: str
) -> str | None:
    """Log a job of the sweeps; without a latency it does not fit."""
    marks = {"config_key": key, "sweeps": f" {' '.join(sweeps)} ", **tags}
    params = {**CHOICES, "model.batch_size": key}
    try:
        with tracker.start(f"job {key}", params, marks) as run:
            if latency_ms is None:
                raise InfeasibleError("too large")
            run.log(metrics={"latency_ms": latency_ms, "peak_memory_gib": 1.0})
    except InfeasibleError:
        pass
    return run.run_id


def start(tracker: Tracker, sweep_id: str, **tags: str) -> str:
    parent = tracker.start_sweep(f"sweep {sweep_id}", {"sweep_id": sweep_id, **tags})
    assert parent is not None
    return parent


def test_a_sweep_is_read_as_logged(store: Path) -> None:
    root = store.parent.parent
    tracker = open_tracker(TrackingConfig(), root)
    config = json.dumps({"schedule": {"name": "none"}, "data_parallel": 1})
    about = {
        "swept": '["model.batch_size", "data_parallel"]',
        "question": "Which?",
        "command": "python -m runner -m",
    }
    parent = start(tracker, "s1", **about)
    pieces = {"config.0": config[:20], "config.1": config[20:]}
    log(tracker, "1", 12.5, "s0", "s1", **pieces)
    log(tracker, "2", None, "s1")
    log(tracker, "3", 99.0, "s10")
    lost = log(tracker, "4", 1.0, "s1")
    assert lost is not None
    tracker.mark_cut_off(lost, "its process died")
    source = open_stored(TrackingConfig(), root)
    (stored,) = sweeps_of(source)
    assert stored.run_id == parent
    data = sweep_from_store(source, stored)
    assert (data.title, data.question, data.command) == ("sweep s1", "Which?", about["command"])
    assert data.swept == ("model.batch_size", "data_parallel")
    first, second = data.rows
    assert (first.status, first.metrics["latency_ms"], first.error) == ("finished", 12.5, None)
    # A setting that is no parameter where it is 1 is in the configuration.
    assert first.settings == {**CHOICES, "model.batch_size": "1", "data_parallel": "1"}
    assert (second.status, second.error) == ("infeasible", "too large")
    assert second.metrics["feasible"] == 0
    assert sweep_from_store(tracker, stored) == data


def test_a_job_that_ran_twice_is_there_once(store: Path) -> None:
    tracker = open_tracker(TrackingConfig(), store.parent.parent)
    start(tracker, "s1")
    with tracker.start("job", CHOICES, {"config_key": "k", "sweeps": " s1 "}) as running:
        assert running.run_id
        source = open_stored(TrackingConfig(), store.parent.parent)
        (parent,) = sweeps_of(source)
        (row,) = sweep_from_store(source, parent).rows
        assert row.status == "running"
        log(tracker, "k", 5.0, "s1")
        (row,) = sweep_from_store(source, parent).rows
        assert (row.status, row.metrics["latency_ms"]) == ("finished", 5.0)


def test_one_of_several_sweeps_is_chosen(store: Path) -> None:
    tracker = open_tracker(TrackingConfig(), store.parent.parent)
    ids = []
    for n in range(3):
        ids.append(start(tracker, f"s{n}", swept=f'["k{n}"]'))
        time.sleep(0.002)  # the store counts milliseconds: the newest is to be another sweep
    source = open_stored(TrackingConfig(), store.parent.parent)
    with pytest.raises(SpecError, match="has no runs"):
        all_runs(source, [], "fxpart")
    log(tracker, "1", 1.0, "s0")
    log(tracker, "2", 2.0)
    sweeps = sweeps_of(source)
    assert chosen_sweep(sweeps, LATEST, "fxpart").run_id == ids[-1]
    assert chosen_sweep(sweeps, ids[1], "fxpart").run_id == ids[1]
    assert chosen_sweep(sweeps, ids[0][:12], "fxpart").run_id == ids[0]
    together = all_runs(source, sweeps, "fxpart")
    assert (len(together.rows), together.swept) == (2, ("k0", "k1", "k2"))
    for sweep_id in ("nothing", ids[0][:1], ""):
        with pytest.raises(SpecError, match="has no sweep"):
            chosen_sweep(sweeps, sweep_id, "fxpart")
    with pytest.raises(SpecError, match="has no sweep; run one with -m"):
        chosen_sweep([], LATEST, "fxpart")


def test_reading_creates_nothing(tmp_path: Path, store: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    with pytest.raises(TrackingError, match="there are no runs at"):
        open_stored(TrackingConfig(), elsewhere)
    assert not elsewhere.exists()
    for _ in range(2):  # the first time created none either
        with pytest.raises(TrackingError, match=r"no experiment 'Defalt' at .*nearest: Default"):
            open_stored(TrackingConfig(experiment="Defalt"), store.parent.parent)
    with pytest.raises(TrackingError, match="does not answer"):
        open_stored(TrackingConfig(uri="http://127.0.0.1:9"), tmp_path)


def test_values_of_a_configuration_as_parameters() -> None:
    config = {"a": {"b": 1, "c": True, "name": "x"}, "d": None}
    keys = ("a.b", "a.c", "a", "d", "a.z", "a.b.c")
    assert [config_value(config, key) for key in keys] == ["1", "true", "x", None, None, None]


def test_a_job_is_in_the_folder_of_the_sweep_that_ran_it(store: Path) -> None:
    root = store.parent.parent
    tracker = open_tracker(TrackingConfig(), root)
    parents = [start(tracker, f"s{n}", folder=str(root / f"s{n}")) for n in range(3)]
    for n, key in enumerate("abc"):
        (root / f"s{n}" / key).mkdir(parents=True)
        (root / f"s{n}" / key / "result.json").write_text(json.dumps({"key": key}))
    # The second sweep reused `a` of the first; `c` lies in the folder of an unrelated sweep.
    log(tracker, "a", 1.0, "s0", "s1", **{"mlflow.parentRunId": parents[0]})
    log(tracker, "b", 2.0, "s1", **{"mlflow.parentRunId": parents[1]})
    log(tracker, "c", 3.0, "s1")
    source = open_stored(TrackingConfig(), root)
    stored = chosen_sweep(sweeps_of(source), parents[1], "fxpart")
    data = sweep_from_store(source, stored)
    places = [str(root / "s0" / "a"), str(root / "s1" / "b"), None]
    assert [row.folder for row in data.rows] == places
    # Jobs of an experiment are looked for in the folders of all sweeps.
    together = all_runs(source, sweeps_of(source), "fxpart")
    assert [row.folder for row in together.rows] == [*places[:2], str(root / "s2" / "c")]
