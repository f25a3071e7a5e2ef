"""A sweep over models that read files: an edit of one runs again what it changes."""

import json
from pathlib import Path
from typing import Any

import pytest

from fxpart.capture.models import files_read
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
LATE = """
from pathlib import Path
import torch
from torch import nn

class Scaled(nn.Linear):
    def forward(self, x):
        return super().forward(x) * float(Path("scale.txt").read_text())

def build(batch_size, dtype):
    return Scaled(8, 8, dtype=dtype), (torch.zeros(batch_size, 8, dtype=dtype),)
"""
SWEPT = [*OWN, SMALL, "mode=single,size_based"]
READING = "model.factory=reads:build"


@pytest.fixture
def here(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's folder that this process works in, with a model that reads a file."""
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    (folder / "reads.py").write_text(READS)
    (folder / "layers.json").write_text("6")
    return folder


def _runs(folder: Path, kind: str = "run") -> list[Any]:
    return [one for one in tracked_runs(folder) if one.data.tags["kind"] == kind]


def _swept(*arguments: str) -> int:
    """Run the sweep as a new process would: nothing was read before."""
    files_read._read.clear()
    return sweep(*arguments)


@pytest.mark.usefixtures("store")
def test_an_edit_of_a_file_that_was_read_runs_its_jobs_again(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _swept(*SWEPT, READING) == 0
    assert "(1 does not fit)" in capsys.readouterr().err  # on one device
    before = {one.info.run_id for one in _runs(here)}
    assert _swept(*SWEPT, READING) == 0
    assert {one.info.run_id for one in _runs(here)} == before

    (here / "layers.json").write_text("3")
    assert _swept(*SWEPT, READING) == 0
    assert "2 of 2 jobs done" in capsys.readouterr().err.splitlines()[-1]
    after = _runs(here)
    assert not before & {one.info.run_id for one in after}
    # Half the layers: now they fit on one device, and are counted in the same sweep.
    assert [one.data.tags["outcome"] for one in after] == ["finished"] * 2
    assert {json.loads(one.data.tags["files_read"])["layers.json"] for one in after} == {
        # echo -n 3 | sha256sum
        "4e07408562bedb8b"
    }
    (parent,) = _runs(here, "sweep")
    assert {one.data.tags["mlflow.parentRunId"] for one in after} == {parent.info.run_id}
    # Those from before stay in the store, and no table counts them.
    assert {one.info.run_id for one in _runs(here, "superseded")} == before
    assert _swept(*SWEPT, READING) == 0
    assert {one.info.run_id for one in _runs(here)} == {one.info.run_id for one in after}


@pytest.mark.usefixtures("store")
def test_only_what_read_the_file_runs_again(here: Path) -> None:
    both = [*SWEPT[:-1], "mode=size_based", "model.factory=tiny:build,reads:build"]
    assert _swept(*both) == 0
    before = {one.data.params["model.factory"]: one.info.run_id for one in _runs(here)}
    (here / "layers.json").write_text("3")
    assert _swept(*both) == 0
    after = {one.data.params["model.factory"]: one.info.run_id for one in _runs(here)}
    assert after["tiny:build"] == before["tiny:build"]
    assert after["reads:build"] != before["reads:build"]


def test_without_a_store_the_files_of_the_sweep_say_it(here: Path) -> None:
    common = ("tracking=none", "mode=size_based", f"hydra.sweep.dir={here}/kept")

    def weights() -> float:
        (result,) = (here / "kept").rglob("result.json")
        stamps.append(result.stat().st_mtime_ns)
        return float(json.loads(result.read_text())["metrics"]["weights_gib"])

    stamps: list[int] = []
    assert _swept(*SWEPT, READING, *common) == 0
    first = weights()
    assert _swept(*SWEPT, READING, *common) == 0
    assert weights() == first
    assert stamps[0] == stamps[1]
    (here / "layers.json").write_text("3")
    assert _swept(*SWEPT, READING, *common) == 0
    assert weights() == pytest.approx(first / 2)


@pytest.mark.usefixtures("store")
def test_a_file_that_is_edited_during_the_sweep_is_told(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "edited.json").write_text("4")
    swept = [*SWEPT[:-1], "mode=size_based", READING]
    files = "+model.factory_args.file=layers.json,edited.json"
    assert _swept(*swept, files) == 2
    said = capsys.readouterr().err
    # What a process has read counts for what it makes afterwards and does not read itself.
    assert "2 jobs read layers.json before it was changed; the same command" in said
    first = {one.data.params["model.factory_args.file"]: one.info.run_id for one in _runs(here)}
    (here / "reads.py").write_text(READS)
    assert _swept(*swept, files) == 0
    again = {one.data.params["model.factory_args.file"]: one.info.run_id for one in _runs(here)}
    assert again["layers.json"] != first["layers.json"]
    assert len(_runs(here)) == 2


@pytest.mark.usefixtures("store")
def test_workers_note_what_they_read(folder: Path) -> None:
    (folder / "reads.py").write_text(READS)
    (folder / "layers.json").write_text("6")
    swept = [*SWEPT, READING, "hydra/launcher=joblib"]
    assert run(folder, "-m", *swept, "hydra.launcher.n_jobs=2").code == 0
    noted = [json.loads(one.data.tags["files_read"]) for one in _runs(folder)]
    assert [list(files) for files in noted] == [["layers.json"]] * 2
    before = {one.info.run_id for one in _runs(folder)}
    (folder / "layers.json").write_text("3")
    again = run(folder, "-m", *swept, "hydra.launcher.n_jobs=2")
    assert again.code == 0, again.err
    assert not before & {one.info.run_id for one in _runs(folder)}


@pytest.mark.usefixtures("store")
def test_an_edit_while_workers_are_at_it_is_told_and_loses_nothing(folder: Path) -> None:
    (folder / "reads.py").write_text(READS)
    (folder / "layers.json").write_text("6")
    (folder / "edited.json").write_text("4")
    files = "+model.factory_args.file=layers.json,edited.json"
    swept = [*SWEPT[:-1], "mode=size_based", READING, files, "hydra/launcher=joblib"]
    done = run(folder, "-m", *swept, "hydra.launcher.n_jobs=1")
    assert done.code == 2
    assert "lost" not in done.err
    assert "read layers.json before it was changed; the same command" in done.err
    assert len(_runs(folder)) == 2
    again = run(folder, "-m", *swept, "hydra.launcher.n_jobs=1")
    assert again.code == 0, again.err
    assert len(_runs(folder)) == 2


def test_what_a_forward_opens_while_it_is_run_counts(here: Path) -> None:
    (here / "late.py").write_text(LATE)
    (here / "scale.txt").write_text("2")
    files_read._read.clear()
    swept = [*SWEPT[:-1], "mode=size_based", "model.factory=late:build", "execute=local"]
    assert sweep(*swept, "devices=1xcpu", "tracking=none", f"hydra.sweep.dir={here}/kept") == 0
    (result,) = (here / "kept").rglob("result.json")
    assert list(json.loads(result.read_text())["files_read"]) == ["scale.txt"]
