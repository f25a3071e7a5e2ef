"""How a sweep treats files that a kill has left, or that somebody has removed."""

import os
from pathlib import Path

import pytest

from fxpart.support.whole_file import temporary_name
from runner.tracking.mlflow_opening import make_file
from tests.runner.command import OWN, SMALL, tracked_runs
from tests.runner.several import run_several
from tests.runner.sweep.sweeping import sweep

SWEPT = [*OWN, SMALL, "mode=size_based,kl_based"]


@pytest.fixture
def here(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's folder that this process works in."""
    monkeypatch.chdir(folder)
    return folder


def _half_written(folder: Path) -> Path:
    """Leave a file in `folder` that a dead process was writing."""
    never = int(Path("/proc/sys/kernel/pid_max").read_text()) + 1
    name = temporary_name().replace(f"_{os.getpid()}_", f"_{never}_")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text("{")
    return folder / name


@pytest.mark.usefixtures("store")
def test_missing_results_are_reported_and_cost_nothing(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert sweep(*SWEPT) == 0
    (sweep_folder,) = (here / "outputs" / "sweeps").iterdir()
    before, _ = capsys.readouterr()
    assert "files:" not in before
    damaged, gone = sorted(sweep_folder.glob("*/result.json"))
    whole = damaged.read_text()
    damaged.write_text(whole[: len(whole) // 2])
    gone.unlink()
    assert sweep(*SWEPT) == 0
    shown, err = capsys.readouterr()
    assert "2 of 2 jobs done (2 before)" in err
    (line,) = [text for text in shown.splitlines() if text.startswith("files:")]
    assert "result.json of 2 settled jobs is damaged or missing (outputs/sweeps/" in line
    runs = {logged.info.run_id for logged in tracked_runs(here, "tags.kind = 'run'")}
    assert len(runs) == 2
    assert any(f"run {run_id}, ..." in line for run_id in runs)
    # The table is as before: it does not depend on the files.
    assert [text for text in shown.splitlines() if text != line] == before.splitlines()


def test_without_a_store_a_job_with_a_missing_result_is_run_again(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    swept = [*SWEPT, "tracking=none", "hydra.sweep.dir=outputs/mine"]
    assert sweep(*swept) == 0
    damaged, gone = sorted((here / "outputs" / "mine").glob("*/result.json"))
    # Valid JSON, and no result.
    damaged.write_text(damaged.read_text().replace('"metrics": {', '"metrics": 3, "other": {'))
    gone.unlink()
    capsys.readouterr()
    assert sweep(*swept) == 0
    shown, err = capsys.readouterr()
    assert "2 of 2 jobs done in" in err
    assert "files:" not in shown
    assert damaged.exists()
    assert gone.exists()


def test_half_written_files_are_removed(here: Path) -> None:
    swept = [*SWEPT, "tracking=none", "hydra.sweep.dir=outputs/mine", "capture.cache_dir=cache"]
    places = ["outputs", "outputs/mine", "outputs/mine/1_tiny_2x0.06mb_kl_based/config", "cache"]
    left = [_half_written(here / place) for place in places]
    under_way = here / "cache" / temporary_name()
    under_way.touch()
    assert sweep(*swept) == 0
    assert [path for path in left if path.exists()] == []
    assert under_way.exists()


def test_an_uninitialized_database_is_removed(store: Path) -> None:
    half = _half_written(store.parent)
    beside = half.with_name(f"{half.name}-wal")
    beside.touch()
    make_file(store)
    assert not half.exists()
    assert not beside.exists()


@pytest.mark.usefixtures("store")
def test_a_refused_sweep_leaves_no_files(folder: Path) -> None:
    half = _half_written(folder / "outputs")
    joblib = ["hydra/launcher=joblib", "hydra.launcher.n_jobs=foo"]
    metric = ["hydra/sweeper=optuna", "hydra.sweeper.metric=nonsense"]
    done = run_several(
        folder,
        [*SWEPT, "-q"],
        [*SWEPT, "-m", *joblib],
        [*SWEPT, *metric, "-m"],
        ["-m", *SWEPT, "hydra.sweeper.params=3"],
        ["-m", *SWEPT, "+hydra.sweeper.n_trails=3"],
        ["-m", *SWEPT, *metric[:1], "+hydra.sweeper.n_trails=3"],
        ["-m", *SWEPT, "zip=mode"],
        ["-m", *SWEPT, "devices=glob("],
    )
    assert [refused.code for refused in done] == [2] * len(done)
    assert [refused.error.partition(";")[0] for refused in done] == [
        "-q is not a flag",
        "hydra.launcher.n_jobs=foo must be a whole number",
        "hydra.sweeper.metric=nonsense is not a metric of a finished job",
        "hydra.sweeper.params=3 must be keys with their values, such as"
        " 'hydra.sweeper.params={devices: \"2x16gb,4x16gb\"}'",
        "hydra.sweeper.n_trails does not exist",
        "hydra.sweeper.n_trails does not exist",
        "zip=mode must be a list, such as zip=[mode,devices]",
        "devices=glob( cannot be read: no viable alternative at input 'glob('",
    ]
    assert [path.name for path in (folder / "outputs").iterdir() if path != half] == ["mlflow.db"]
