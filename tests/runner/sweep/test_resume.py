"""A restarted sweep runs only the missing jobs, and each job once."""

import json
import signal
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from fxpart.errors import SpecError
from runner.sweep.axes import Axis
from runner.sweep.grid import _title
from tests.runner.command import OWN, SMALL, run, tracked_runs
from tests.runner.sweep.sweeping import sweep

# The relevant effect of a full disk: a write that fails in the middle.
LITTLE_ROOM = """
import resource, sys
from runner.app import main
resource.setrlimit(resource.RLIMIT_FSIZE, (120_000, resource.RLIM_INFINITY))
sys.exit(main())
"""


@pytest.fixture
def here(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's folder that this process works in."""
    monkeypatch.chdir(folder)
    return folder


def _by_kind(folder: Path) -> dict[str, list[Any]]:
    by_kind: dict[str, list[Any]] = {}
    for run_ in tracked_runs(folder):
        by_kind.setdefault(run_.data.tags["kind"], []).append(run_)
    return by_kind


def _each_once(folder: Path, jobs: int) -> list[Any]:
    """Check that every job has exactly one result in one finished sweep; return its runs."""
    runs = _by_kind(folder)
    keys = Counter(logged.data.tags["config_key"] for logged in runs["run"])
    assert sorted(keys.values()) == [1] * jobs
    (parent,) = runs["sweep"]
    assert parent.info.status == "FINISHED"
    sweep_id = parent.data.tags["sweep_id"]
    for logged in runs["run"]:
        assert logged.data.tags["outcome"] in ("finished", "infeasible")
        assert f" {sweep_id} " in logged.data.tags["sweeps"]
        assert logged.data.tags["mlflow.parentRunId"] == parent.info.run_id
    return runs["run"]


@pytest.mark.usefixtures("store")
@pytest.mark.parametrize(
    ("factory", "code", "last"),
    [
        ("is_killed", -signal.SIGKILL, None),
        ("is_interrupted", 130, "interrupted: 1 of 3 jobs done; the same command resumes it"),
    ],
)
def test_an_interrupted_sweep_continues(
    folder: Path, factory: str, code: int, last: str | None
) -> None:
    factories = f"model.factory=tiny:build,tiny:{factory},tiny:nested"
    swept = ["-m", "model=custom", "model.name=tiny", "reserve=none", SMALL, factories]
    swept += ["capture.use_cache=false"]  # always build the model
    first = run(folder, *swept)
    assert first.code == code, first.err
    # A slow machine is told how much is left, too.
    lines = [line for line in first.err.splitlines() if not line.endswith(" left")]
    summaries = [line for line in lines if "jobs done" in line]
    assert summaries == ([last] if last else [])
    assert last is None or first.err.endswith(f"{last}\n")
    second = run(folder, *swept)
    assert second.code == 0, second.err
    assert "3 of 3 jobs done (1 before)" in second.err
    _each_once(folder, 3)
    (cut,) = _by_kind(folder)["cut_off"]
    assert cut.info.status == "KILLED"
    assert cut.data.tags["outcome"] == "cut_off"
    assert "its process ended" in cut.data.tags["error"]
    assert "mlflow.parentRunId" not in cut.data.tags
    assert len(list((folder / "outputs" / "sweeps").iterdir())) == 1


@pytest.mark.usefixtures("store")
def test_an_interrupted_sweep_shows_why_jobs_failed(folder: Path) -> None:
    factories = "model.factory=tiny:bulid,tiny:is_interrupted,tiny:nested"
    swept = ["-m", "model=custom", "model.name=tiny", "reserve=none", SMALL, factories]
    done = run(folder, *swept, "mode=single,size_based", "capture.use_cache=false")
    assert done.code == 130
    failure, last = done.err.splitlines()[-2:]
    assert failure.startswith("2 jobs failed: ")
    assert "nearest: build" in failure
    assert last == "interrupted: 2 of 6 jobs done (2 failed); the same command resumes it"


@pytest.mark.usefixtures("store")
def test_a_completed_sweep_has_nothing_to_do(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    swept = [*OWN, "devices=1x0.06mb,2x0.06mb", "mode=single,size_based"]
    assert sweep(*swept) == 0
    shown, _ = capsys.readouterr()
    runs = {logged.info.run_id for logged in _each_once(here, 4)}
    assert sweep(*swept) == 0
    again, err = capsys.readouterr()
    assert "4 of 4 jobs done (4 before, 3 do not fit)" in err
    assert {logged.info.run_id for logged in _each_once(here, 4)} == runs
    assert again == shown
    assert sweep(*swept, "resume=false") == 0
    assert len(_by_kind(here)["run"]) == 8
    assert len(_by_kind(here)["sweep"]) == 2


@pytest.mark.usefixtures("store")
def test_runs_and_sweeps_have_different_names(here: Path) -> None:
    layers = "+model.factory_args.layers=2,4"
    assert sweep(*OWN, SMALL, layers, "mode=single,size_based", "model.batch_size=3") == 0
    runs = _by_kind(here)
    beside = "2x0.06mb · pcie4 · tiny · reserve=none · batch_size=3"
    assert {run_.info.run_name for run_ in runs["run"]} == {
        f"layers={layers} · {mode} · {beside}"
        for layers in ("2", "4")
        for mode in ("single", "size_based")
    }
    (parent,) = runs["sweep"]
    assert parent.info.run_name == "sweep: layers=2,4 · mode=single,size_based"


def test_a_title_does_not_depend_on_the_place_of_the_log() -> None:
    swept = ("tracking.uri=postgresql://me:word@host/a", "tracking.uri=postgresql://me:word@host/b")
    axes = (
        Axis(("tracking.uri",), tuple((override,) for override in swept)),
        Axis(("mode",), (("mode=a",),)),
    )
    config = OmegaConf.create({"hydra": {"runtime": {"choices": {"experiment": "mine"}}}})
    assert _title(axes, config) == "mine: mode=a"


@pytest.mark.usefixtures("store")
def test_a_larger_sweep_takes_over_results_of_another(here: Path) -> None:
    assert sweep(*OWN, SMALL, "mode=size_based") == 0
    assert sweep(*OWN, SMALL, "mode=size_based,kl_based") == 0
    runs = _by_kind(here)
    assert len(runs["run"]) == 2
    larger = next(
        logged for logged in runs["sweep"] if "mode" in json.loads(logged.data.tags["swept"])
    )
    for logged in runs["run"]:
        assert f" {larger.data.tags['sweep_id']} " in logged.data.tags["sweeps"]


@pytest.mark.usefixtures("store")
def test_a_job_that_failed_is_run_again_and_shown_once(here: Path) -> None:
    swept = ["model=custom", "model.name=tiny", SMALL, "reserve=none"]
    swept += ["model.factory=tiny:build,later:build"]
    (here / "later.py").write_text("def build(batch_size, dtype):\n    return 1 / 0\n")
    assert sweep(*swept) == 2
    (here / "later.py").write_text("from tiny import nested as build\n")
    del sys.modules["later"]
    assert sweep(*swept) == 0
    keys = [logged.data.tags["config_key"] for logged in _by_kind(here)["run"]]
    assert len(keys) == len(set(keys))


@pytest.mark.usefixtures("store")
def test_a_full_disk_loses_only_the_unwritten_results(folder: Path) -> None:
    swept = ["-m", *OWN, "devices=2x0.06mb,3x0.06mb,4x0.06mb", "mode=size_based,kl_based"]

    full = run(folder, *swept, program=("-c", LITTLE_ROOM))
    assert full.code == 2, full.err
    assert "Traceback" not in full.err
    again = run(folder, *swept)
    assert again.code == 0, again.err
    _each_once(folder, 6)


@pytest.mark.usefixtures("store")
def test_without_a_store_the_files_are_used(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    swept = [*OWN, SMALL, "mode=size_based,kl_based", "tracking=none"]
    swept += ["hydra.sweep.dir=outputs/mine"]
    assert sweep(*swept) == 0
    (lost,) = (here / "outputs" / "mine").glob("1_*/result.json")
    lost.write_text("{")
    capsys.readouterr()
    assert sweep(*swept) == 0
    shown, err = capsys.readouterr()
    assert "2 of 2 jobs done (1 before)" in err
    assert "2 runs" in shown


@pytest.mark.usefixtures("store")
def test_an_edit_during_a_sweep_has_no_effect(here: Path) -> None:
    (here / "conf" / "model").mkdir(parents=True)
    for name in ("one", "two"):
        text = "name: mine\nfactory: edits:build\nfactory_args: {layers: 2}\n"
        (here / "conf" / "model" / f"{name}.yaml").write_text(text)
    edit = (
        "from pathlib import Path\nimport tiny\n"
        "def build(batch_size, dtype, layers):\n"
        "    Path('conf/model/two.yaml').write_text('name: [')\n"
        "    return tiny.build(batch_size, dtype, layers=layers)\n"
    )
    (here / "edits.py").write_text(edit)
    assert sweep("model=one,two", "model.batch_size=1,2", SMALL, "reserve=none") == 0
    runs = _by_kind(here)["run"]
    assert {logged.data.params["model.factory_args.layers"] for logged in runs} == {"2"}


@pytest.mark.usefixtures("store")
def test_identical_jobs_are_run_once(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert sweep(*OWN, SMALL, "optimizer=adamw,sgd") == 0
    assert "is" in capsys.readouterr().out
    assert len(_by_kind(here)["run"]) == 1


@pytest.mark.usefixtures("store")
def test_where_and_zip_choose_the_jobs(here: Path) -> None:
    swept = [*OWN, "mode=single,size_based", "devices=1x1mb,2x0.06mb,4x0.06mb"]
    assert sweep(*swept, "where=n_devices < 4 and (mode != 'single' or n_devices == 1)") == 0
    chosen = {(r.data.params["mode"], r.data.params["devices"]) for r in _by_kind(here)["run"]}
    assert chosen == {
        ("single", "1x1mb"),
        ("size_based", "1x1mb"),
        ("size_based", "2x0.06mb"),
    }
    zipped = ["mode=kl_based,pipeline", "devices=1x1mb,2x1mb", "zip=[mode,devices]"]
    assert sweep(*OWN, *zipped) == 0
    assert len(_by_kind(here)["run"]) == 5
    with pytest.raises(SpecError, match=r"leaves none of 2 jobs"):
        sweep(*OWN, "mode=kl_based,pipeline", SMALL, "where=n_devices > 7")
