"""A sweep over models that depend on files: an edit of one runs the affected jobs again."""

import json
from pathlib import Path
from typing import Any

import pytest

from fxpart.errors import SpecError
from tests.runner.command import OWN, SMALL, run, tracked_runs
from tests.runner.sweep.sweeping import sweep

READS = """
import json
from pathlib import Path
import tiny

def build(batch_size, dtype, file="layers.json"):
    layers = json.loads(Path(file).read_text())
    if file == "edited.json":
        Path("layers.json").write_text("5")
    return tiny.build(batch_size, dtype, layers=layers)
"""
SWEPT = [*OWN, SMALL, "mode=single,size_based"]
READING = ("model.factory=reads:build", "model.depends_on=[layers.json]")


@pytest.fixture
def here(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's folder that this process works in, with a model that reads a file."""
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    (folder / "reads.py").write_text(READS)
    (folder / "layers.json").write_text("6")
    return folder


def _runs(folder: Path, kind: str = "run") -> list[Any]:
    return [logged for logged in tracked_runs(folder) if logged.data.tags["kind"] == kind]


@pytest.mark.usefixtures("store")
def test_an_edit_of_a_file_runs_its_jobs_again(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert sweep(*SWEPT, *READING) == 0
    assert "(1 does not fit)" in capsys.readouterr().err  # on one device
    before = {logged.info.run_id for logged in _runs(here)}
    assert sweep(*SWEPT, *READING) == 0
    assert {logged.info.run_id for logged in _runs(here)} == before

    (here / "layers.json").write_text("3")
    assert sweep(*SWEPT, *READING) == 0
    assert "2 of 2 jobs done" in capsys.readouterr().err.splitlines()[-1]
    after = [logged for logged in _runs(here) if logged.info.run_id not in before]
    # Half the layers: now they fit on one device.
    assert [logged.data.tags["outcome"] for logged in after] == ["finished"] * 2
    # They are jobs of another sweep: neither table counts jobs of the other.
    assert len(_runs(here, "sweep")) == 2
    (here / "layers.json").write_text("6")
    assert sweep(*SWEPT, *READING) == 0
    assert len(_runs(here)) == 4


@pytest.mark.usefixtures("store")
def test_only_jobs_that_depend_on_the_file_run_again(here: Path) -> None:
    (here / "other.json").write_text("6")
    both = [
        *SWEPT[:-1],
        "mode=size_based",
        "model.factory=reads:build",
        "+model.factory_args.file=layers.json,other.json",
        "model.depends_on=[layers.json],[other.json]",
        "zip=[model.factory_args.file,model.depends_on]",
    ]
    assert sweep(*both) == 0
    assert len(_runs(here)) == 2
    (here / "layers.json").write_text("3")
    assert sweep(*both) == 0
    files = [logged.data.params["model.factory_args.file"] for logged in _runs(here)]
    assert sorted(files) == ["layers.json", "layers.json", "other.json"]


@pytest.mark.usefixtures("store")
def test_a_missing_file_is_one_line(here: Path) -> None:
    (here / "layers.json").unlink()
    with pytest.raises(SpecError) as refused:
        sweep(*SWEPT, *READING)
    assert str(refused.value) == (
        "model.depends_on: cannot read layers.json (No such file or directory); give paths "
        "relative to the folder that the command is started in"
    )
    assert [path.name for path in (here / "outputs").iterdir()] == ["mlflow.db"]


def test_without_a_store_the_files_of_the_sweep_decide(here: Path) -> None:
    common = ("tracking=none", "mode=size_based", f"hydra.sweep.dir={here}/kept")

    def weights() -> float:
        (result,) = (here / "kept").rglob("result.json")
        stamps.append(result.stat().st_mtime_ns)
        return float(json.loads(result.read_text())["metrics"]["weights_gib"])

    stamps: list[int] = []
    assert sweep(*SWEPT, *READING, *common) == 0
    first = weights()
    assert sweep(*SWEPT, *READING, *common) == 0
    assert weights() == first
    assert stamps[0] == stamps[1]
    (here / "layers.json").write_text("3")
    assert sweep(*SWEPT, *READING, *common) == 0
    assert weights() == pytest.approx(first / 2)


@pytest.mark.usefixtures("store")
def test_jobs_after_an_edit_during_the_sweep_fail_and_are_done_again(here: Path) -> None:
    (here / "edited.json").write_text("4")
    swept = [*SWEPT[:-1], "mode=size_based", *READING]
    files = "+model.factory_args.file=layers.json,edited.json"
    assert sweep(*swept, files) == 2
    by_file = {logged.data.params["model.factory_args.file"]: logged for logged in _runs(here)}
    assert by_file["layers.json"].data.tags["outcome"] == "finished"
    assert by_file["edited.json"].data.tags["error"] == (
        "a source file of factory=reads:build changed during the capture; start again without "
        "editing it"
    )
    (here / "reads.py").write_text(READS.replace('write_text("5")', "read_text()"))
    assert sweep(*swept, files) == 0


@pytest.mark.usefixtures("store")
def test_workers_know_the_files_too(folder: Path) -> None:
    (folder / "reads.py").write_text(READS)
    # Else the worker would import torch, and capture the model.
    (folder / "layers.json").write_text("3")
    assert run(folder, *OWN, SMALL, "mode=single", *READING, "tracking=none").code == 0
    (folder / "layers.json").write_text("6")
    assert run(folder, "-m", *SWEPT, *READING).code == 0
    before = {logged.info.run_id for logged in _runs(folder)}
    (folder / "layers.json").write_text("3")
    in_a_worker = ("hydra/launcher=joblib", "hydra.launcher.n_jobs=1")
    again = run(folder, "-m", *SWEPT, *READING, *in_a_worker)
    assert again.code == 0, again.err
    after = {logged.info.run_id for logged in _runs(folder)}
    assert before < after
    assert len(after) == 4
