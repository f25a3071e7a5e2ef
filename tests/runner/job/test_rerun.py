"""Repeating a run from its log."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient

from fxpart.errors import SpecError
from runner.config.schema import Config
from runner.job.identity import Choices, JobIdentity
from runner.job.rerun import rerun
from tests.runner.command import OWN, SMALL, tracked_runs
from tests.runner.composed import read
from tests.runner.sweep.sweeping import sweep

pytestmark = pytest.mark.usefixtures("store")


@pytest.fixture
def logged(folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str | None, Any]:
    """The runs of a small sweep by their mode; under None the sweep's own run."""
    monkeypatch.chdir(folder)
    assert sweep(*OWN, SMALL, "mode=single,kl_based") == 0
    return {run.data.params.get("mode"): run for run in tracked_runs(folder)}


def _again(run_id: str, *overrides: str) -> tuple[Config, JobIdentity]:
    folder = Path.cwd() / "outputs" / "again"
    choices = Choices("gpt2", "single", "1x16gb", "pcie4")
    identity = JobIdentity(choices, (f"rerun={run_id}", *overrides), folder, Path.cwd())
    return read(f"rerun={run_id}", *overrides), identity


def test_a_run_is_repeated_with_the_same_result(
    logged: dict[str | None, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    run_id = logged["kl_based"].info.run_id
    capsys.readouterr()
    outcome = rerun(*_again(run_id))
    assert outcome.status == "finished"
    shown = capsys.readouterr().out
    assert f"rerun:     the same as {run_id} in latency_ms, peak_memory_gib" in shown
    assert "an input of its result has changed" not in shown
    again = next(r for r in tracked_runs(Path.cwd()) if "sweeps" not in r.data.tags)
    assert again.data.params == logged["kl_based"].data.params
    assert again.data.tags["config_key"] == logged["kl_based"].data.tags["config_key"]


def test_the_beginning_of_an_id_is_enough(logged: dict[str | None, Any]) -> None:
    run_id = logged["kl_based"].info.run_id
    assert rerun(*_again(run_id[:12])).status == "finished"


def test_the_folder_of_a_run_is_enough(
    logged: dict[str | None, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    result = next(
        path
        for path in Path("outputs").rglob("result.json")
        if json.loads(path.read_text())["config"]["choices"]["mode"] == "kl_based"
    )
    assert rerun(*_again(f"{result.parent}")).status == "finished"
    assert f"the same as {logged['kl_based'].info.run_id}" in capsys.readouterr().out
    result.write_text(result.read_text().replace('"key"', '"no key"'))
    with pytest.raises(SpecError, match=r"result\.json has no key of a run; give the run's id"):
        rerun(*_again(f"{result.parent}"))


@pytest.mark.parametrize(
    ("overrides", "expected"), [((), "depth"), (("tracking.experiment=other",), "other")]
)
def test_it_is_logged_beside_the_run_unless_another_experiment_is_given(
    folder: Path, monkeypatch: pytest.MonkeyPatch, overrides: tuple[str, ...], expected: str
) -> None:
    monkeypatch.chdir(folder)
    assert sweep(*OWN, SMALL, "mode=kl_based", "tracking.experiment=depth") == 0
    (run,) = [stored for stored in _runs_in("depth") if stored.data.tags["kind"] == "run"]
    before = {name: len(_runs_in(name)) for name in ("fxpart", "depth", "other")}
    assert rerun(*_again(run.info.run_id, *overrides)).status == "finished"
    after = {name: len(_runs_in(name)) for name in before}
    assert after == {**before, expected: before[expected] + 1}


def _runs_in(experiment: str) -> list[Any]:
    client = MlflowClient(f"sqlite:///{Path.cwd()}/outputs/mlflow.db")
    stored = client.get_experiment_by_name(experiment)
    return list(client.search_runs([stored.experiment_id])) if stored else []


def test_a_run_that_does_not_fit_does_not_fit_again(logged: dict[str | None, Any]) -> None:
    outcome = rerun(*_again(logged["single"].info.run_id))
    assert outcome.status == "infeasible"


def test_a_model_edited_since_is_reported(
    logged: dict[str | None, Any],
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for line, is_told in (("# says nothing new", False), ("EDITED = True", True)):
        monkeypatch.delitem(sys.modules, "tiny", raising=False)  # as in a process of its own
        with (folder / "tiny.py").open("a") as source:
            source.write(f"\n{line}\n")
        capsys.readouterr()
        assert rerun(*_again(logged["kl_based"].info.run_id)).status == "finished"
        shown = capsys.readouterr().out
        assert "rerun:     the same as" in shown
        assert ("an input of its result has changed: a source of the model" in shown) is is_told


def test_a_changed_file_that_the_model_depends_on_is_reported(
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(folder)
    (folder / "reads.py").write_text(
        "import tiny\nfrom pathlib import Path\n\n"
        "def build(batch_size, dtype):\n"
        "    return tiny.build(batch_size, dtype, layers=int(Path('layers.txt').read_text()))\n"
    )
    (folder / "layers.txt").write_text("6")
    reading = ("model.factory=reads:build", "model.depends_on=[layers.txt]")
    assert sweep(*OWN, SMALL, *reading, "mode=kl_based") == 0
    (run,) = [stored for stored in tracked_runs(folder) if stored.data.tags["kind"] == "run"]
    for text, is_told in (("6", False), (" 6", True)):
        (folder / "layers.txt").write_text(text)
        capsys.readouterr()
        assert rerun(*_again(run.info.run_id)).status == "finished"
        out = capsys.readouterr().out
        assert "rerun:     the same as" in out
        changed = "has changed: a source of the model, a file of model.depends_on"
        assert (changed in out) is is_told
    (folder / "layers.txt").unlink()
    outcome = rerun(*_again(run.info.run_id))
    assert outcome.status == "failed"
    assert str(outcome.error).startswith("model.depends_on: cannot read layers.txt (No such file")


def test_a_run_that_now_fails_is_compared_with_nothing(
    logged: dict[str | None, Any],
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delitem(sys.modules, "tiny", raising=False)
    (folder / "tiny.py").write_text("def build(batch_size, dtype):\n    return None\n")
    assert rerun(*_again(logged["kl_based"].info.run_id)).status == "failed"
    assert "rerun:" not in capsys.readouterr().out


def test_a_run_that_cannot_be_repeated_is_one_line(logged: dict[str | None, Any]) -> None:
    run_id = logged["kl_based"].info.run_id
    with pytest.raises(SpecError, match="leave out mode="):
        rerun(*_again(run_id, "mode=single"))
    with pytest.raises(SpecError, match="is a sweep; repeat it with python -m runner -m"):
        rerun(*_again(logged[None].info.run_id))
    with pytest.raises(SpecError, match="there is no folder outputs/none; give the folder of a"):
        rerun(*_again("outputs/none"))
    with pytest.raises(SpecError, match="'none' is too short for a run's id; give its first 6"):
        rerun(*_again("none"))
    with pytest.raises(SpecError, match="there is no run 'nowhere' at sqlite:"):
        rerun(*_again("nowhere"))
    with pytest.raises(SpecError, match="there is no run 'nowhere': tracking=none keeps none"):
        rerun(*_again("nowhere", "tracking=none"))
