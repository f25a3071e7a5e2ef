"""The named experiments: the question of each, whether its jobs make sense, and a small run."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from runner.config import choices
from runner.config import read as config
from runner.config.choices import experiments_text, questions
from runner.config.paths import conf_dir
from runner.experiment.check import check_all
from runner.experiment.model_spec import model_spec
from runner.sweep.axes import Axis, read_axes
from runner.sweep.composition import Composed, SweepLoad, compose_grid
from tests.runner.command import OWN
from tests.runner.several import run_several

NAMES = sorted(path.stem for path in (conf_dir() / "experiment").glob("*.yaml"))
SMALL = {
    "batch_frontier": ["model.batch_size=1,4", "checkpointing=none", "devices=2x1mb"],
    "scale_devices": ["devices=1x0.06mb,2x0.06mb,2x1mb"],
}
"""A few jobs of each sweep, with a tiny model; everything else stays as in the file.

The other two experiments differ from the second only in values, which a test without a run checks.
"""
JOBS = {"batch_frontier": 4, "scale_devices": 3}
LATENCIES = "attributes.status = 'FINISHED' and metrics.latency_ms > 0"


@cache
def swept(*arguments: str) -> tuple[DictConfig, tuple[Axis, ...], list[Composed]]:
    """Return the configuration of a sweep that needs no ``-m``, its axes and its jobs."""
    config.register()
    choices.register()
    with initialize_config_dir(str(conf_dir()), version_base="1.3", job_name="fxpart"):
        hydra = GlobalHydra.instance().hydra
        assert hydra is not None
        assert hydra.get_mode("config", list(arguments)) == RunMode.MULTIRUN
        whole = hydra.compose_config(
            "config", list(arguments), run_mode=RunMode.MULTIRUN, with_log_configuration=False
        )
        params: Any = OmegaConf.to_container(whole.hydra.sweeper.params)
        fixed, axes = read_axes(list(whole.hydra.overrides.task), params, None, hydra.config_loader)
        return whole, axes, compose_grid(SweepLoad(hydra.config_loader, whole), fixed, axes)


@pytest.mark.parametrize("name", NAMES)
def test_an_experiment_is_a_sweep_with_a_question(name: str) -> None:
    whole, axes, jobs = swept(f"experiment={name}")
    assert whole.tracking.experiment == name
    assert whole.question == questions()[name]
    assert whole.question.endswith("?")
    assert whole.question.count("?") == 1
    assert 1 <= len(axes) <= 3
    assert 10 <= len(jobs) <= 40


@pytest.mark.parametrize("name", NAMES)
def test_each_job_of_an_experiment_makes_sense(name: str) -> None:
    _, _, jobs = swept(f"experiment={name}")
    for job in jobs:
        assert job.config is not None, job.error
        check_all(job.config)
    assert len({model_spec(job.config).name for job in jobs if job.config}) == 1


def test_typed_values_take_precedence_over_the_experiment() -> None:
    _, axes, jobs = swept("experiment=compare_modes", "mode=kl_based", "model=gpt2")
    assert [axis.keys for axis in axes] == [("devices",)]
    assert {(job.choices.mode, job.choices.model) for job in jobs} == {("kl_based", "gpt2")}
    _, axes, jobs = swept("experiment=compare_modes", "devices=1x80gb,2x80gb", "microbatches=3")
    assert {job.choices.devices for job in jobs} == {"1x80gb", "2x80gb"}
    assert {job.config.microbatches for job in jobs if job.config} == {3}


def test_questions_are_those_of_the_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    user_dir = tmp_path / "conf" / "experiment" / "mine"
    user_dir.mkdir(parents=True)
    folded = "# @package _global_\nquestion: Is it\n  'the link' that\n  costs?\nmicrobatches: 2\n"
    (user_dir / "folded.yaml").write_text(folded)
    (user_dir / "quoted.yaml").write_text('question: "Which: this?"\n')
    (user_dir / "silent.yaml").write_text("microbatches: 2\n")
    # A shipped file takes precedence over a user's of the same name.
    (user_dir.parent / "link_speed.yaml").write_text("question: mine?\n")
    monkeypatch.chdir(tmp_path)
    texts = questions()
    assert list(texts) == sorted([*NAMES, "mine/folded", "mine/quoted", "mine/silent"])
    for name in NAMES:
        assert texts[name] == OmegaConf.load(conf_dir() / "experiment" / f"{name}.yaml").question
    assert texts["mine/folded"] == OmegaConf.create(folded).question
    assert texts["mine/quoted"] == "Which: this?"
    assert texts["mine/silent"] == ""
    text = experiments_text()
    assert "\nmine/quoted       Which: this?\n" in text
    assert max(map(len, text.splitlines())) <= 100


@pytest.mark.usefixtures("store")
def test_a_small_version_of_an_experiment_runs(folder: Path) -> None:
    from mlflow import MlflowClient

    commands = [[f"experiment={name}", *OWN, *SMALL[name]] for name in SMALL]
    *done, typo = run_several(folder, *commands, ["experiment=compare_mode"])
    client = MlflowClient(f"sqlite:///{folder / 'outputs' / 'mlflow.db'}")
    for name, result in zip(SMALL, done, strict=True):
        assert result.code == 0, result.err
        kept = client.get_experiment_by_name(name)
        assert kept is not None, name
        (parent,) = client.search_runs([kept.experiment_id], "tags.kind = 'sweep'")
        assert parent.data.tags["experiment"] == name
        assert parent.data.tags["question"] == questions()[name]
        runs = client.search_runs([kept.experiment_id], "tags.kind = 'run'")
        assert len(runs) == JOBS[name]
        # On one of the devices that are too small it does not fit.
        assert len(client.search_runs([kept.experiment_id], LATENCIES)) == JOBS[name] - (
            name == "scale_devices"
        )
    assert typo.code == 2
    assert typo.error.startswith("experiment=compare_mode does not exist; ")
    assert "compare_modes" in typo.error
