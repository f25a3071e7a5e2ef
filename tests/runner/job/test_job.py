"""A single job in this process: its output, its files and its logged run."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from fxpart.errors import SpecError
from fxpart.placement.optimal.mode import Progress
from runner.config.schema import Config, TrackingConfig
from runner.config.tags import config_from_tags
from runner.experiment.experiment import plan
from runner.experiment.result import Result
from runner.job import files as job_files
from runner.job.identity import Choices, JobIdentity, SweepIds
from runner.job.job import Outcome, keep_failure, run_job
from runner.tracking.open_tracker import open_tracker
from runner.tracking.tracker import LoggedRun
from tests.runner.command import OWN, SMALL
from tests.runner.composed import read

SWEEP = SweepIds("abcd", None)
TRACES = ("trace.json",)
FIGURES = ("memory.svg", "partition_graph.svg")


@pytest.fixture
def here(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    return folder


def configured(*overrides: str) -> Config:
    return read(*OWN, SMALL, "mode=size_based", "tracking=none", *overrides)


def identity(here: Path, name: str = "job", sweep: SweepIds | None = None) -> JobIdentity:
    chosen = Choices("tiny", "size_based", "2x0.06mb", "pcie4")
    overrides = ("mode=size_based", "tracking.uri=http://me:secret@host", "+hydra.x=1")
    return JobIdentity(chosen, overrides, here / "outputs" / name, here, sweep)


def result(done: JobIdentity) -> dict[str, object]:
    return dict(json.loads((done.folder / "result.json").read_text()))


def logged(here: Path) -> LoggedRun:
    (run,) = open_tracker(TrackingConfig(), here).runs({"kind": "run"})
    return run


def test_a_job_of_a_sweep_is_silent_and_has_the_same_result(
    here: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    alone, swept = identity(here, "alone"), identity(here, "swept", SWEEP)
    first = run_job(configured(), alone)
    assert "lower bound" in capfd.readouterr().out
    second = run_job(configured(), swept)
    assert capfd.readouterr() == ("", "")
    assert first.status == second.status == "finished"
    kept = [json.loads((i.folder / "assignment.json").read_text()) for i in (alone, swept)]
    assert kept[0] == kept[1]
    differs = {key for key in first.metrics if first.metrics[key] != second.metrics[key]}
    assert differs <= {"partition_s", "capture_s"}
    assert second.metrics == result(swept)["metrics"]
    assert (result(alone)["sweep"], result(swept)["sweep"]) == (None, "abcd")
    assert result(alone)["key"] == result(swept)["key"]


def test_a_verbose_job_of_a_sweep_prints_the_same_as_alone(
    here: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run_job(configured("verbose=true"), identity(here, sweep=SWEEP))
    assert "lower bound" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("schedule", "latency", "peak"),
    [
        ("none", "latency ", "device "),
        ("gpipe", "latency of one microbatch ", "of one microbatch: "),
    ],
)
def test_with_a_schedule_the_summary_and_the_peak_are_of_one_microbatch(
    schedule: str, latency: str, peak: str, here: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    chosen = ("mode=pipeline", f"schedule={schedule}", "tracking=none", "devices=2x16gb")
    run_job(read(*OWN, *chosen), identity(here))
    lines = capfd.readouterr().out.splitlines()
    (summary,) = (line for line in lines if line.startswith("latency"))
    assert summary.removeprefix(latency)[0].isdigit()
    (holds,) = (line for line in lines if line.startswith("peak:"))
    assert holds.startswith(f"peak:      {peak}")


def test_a_step_in_another_order_is_run_and_names_its_engine(
    here: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    late = identity(here, "late")
    done = run_job(
        read(
            *OWN,
            "devices=2x16gb",
            "mode=size_based",
            "tracking=none",
            "phase=training",
            "phase.train_mode=false",
            "optimizer=none",
            "execute=local",
            "execute.repeats=1",
            "backward_order=late_weight_gradients",
        ),
        late,
    )
    assert done.status == "finished"
    lines = capfd.readouterr().out.splitlines()
    (engine,) = (line for line in lines if line.startswith("runs with:"))
    assert "zero-bubble schedule of torch.distributed.pipelining" in engine
    assert any(line.startswith("results:   equal to the unsplit model's") for line in lines)
    # Six layers: the gradients of all activations come before the first of a weight.
    assert done.metrics["measured_peak_gib"] == done.metrics["predicted_peak_gib"]


@pytest.mark.parametrize(
    ("figures", "sweep", "expected"),
    [
        ("auto", None, {*TRACES, *FIGURES}),
        ("auto", SWEEP, {*FIGURES}),
        ("all", SWEEP, {*TRACES, *FIGURES}),
        ("none", None, set()),
    ],
)
def test_figures_are_drawn_as_asked(
    here: Path, figures: str, sweep: SweepIds | None, expected: set[str]
) -> None:
    job = identity(here, sweep=sweep)
    assert run_job(configured(f"figures={figures}"), job).error is None
    files = {path.name for path in job.folder.iterdir()}
    assert files & {*TRACES, *FIGURES} == expected
    assert files >= {"assignment.json", "result.json", "config", "device_map.json"}


def test_an_unknown_choice_of_figures_is_one_line(here: Path) -> None:
    outcome = run_job(configured("figures=al"), identity(here))
    assert outcome == Outcome("failed", "figures=al does not exist; write auto, all, none")


def test_the_written_configuration_is_the_one_run_without_a_login(here: Path) -> None:
    config, job = configured("mode=kl_based"), identity(here)
    config.tracking = replace(config.tracking, uri="http://me:a/secret@host:5000/x?token=secret")
    run_job(config, job)
    config.tracking.uri = "http://host:5000/x?token=***"
    written = (job.folder / "config" / "resolved.yaml").read_text()
    assert written == OmegaConf.to_yaml(asdict(config))
    overrides = (job.folder / "config" / "overrides.txt").read_text().splitlines()
    kept = json.loads((job.folder / "result.json").read_text())["config"]
    assert overrides == kept["overrides"] == ["mode=size_based"]
    assert not [path for path in job.folder.rglob("*.*") if b"secret" in path.read_bytes()]


def test_a_model_that_does_not_fit_is_an_outcome_with_its_metric(here: Path) -> None:
    job = identity(here)
    outcome = run_job(configured("devices=1x0.06mb"), job)
    assert (outcome.status, outcome.metrics) == ("infeasible", {"feasible": 0.0})
    assert result(job)["key"]


@pytest.mark.usefixtures("store")
def test_a_run_can_be_found_and_run_again_by_its_tags(here: Path) -> None:
    config = replace(configured(), tracking=TrackingConfig())
    parent = open_tracker(config.tracking, here).start_sweep("s", {"kind": "sweep"})
    job = identity(here, sweep=SweepIds("abcd", parent))
    assert run_job(config, job).error is None
    tags = logged(here).tags
    assert tags["config_key"] == result(job)["key"]
    assert (tags["sweeps"], tags["mlflow.parentRunId"]) == (" abcd ", parent)
    assert tags["outcome"] == "finished"
    assert json.loads(tags["overrides"]) == ["mode=size_based"]
    assert "secret" not in str(tags)
    assert config_from_tags(tags) == config


def test_an_interrupted_search_is_a_result_alone_and_ends_a_sweep(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut_short = (Progress(1.5, 12, 0.5, 0.4, "work", is_interrupted=True),)

    def interrupted(*arguments: Any, **settings: Any) -> Result:  # noqa: ANN401 - those of `plan`
        return replace(plan(*arguments, **settings), curve=cut_short)

    monkeypatch.setattr("runner.job.job.plan", interrupted)
    assert run_job(configured(), identity(here)).status == "finished"
    with pytest.raises(KeyboardInterrupt):
        run_job(configured(), identity(here, "swept", SWEEP))
    assert not (here / "outputs" / "swept" / "assignment.json").exists()


@pytest.mark.usefixtures("store")
def test_a_run_in_progress_has_its_tags(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[LoggedRun] = []

    def look(*_: object, **__: object) -> None:
        seen.append(logged(here))
        raise SpecError("seen")

    monkeypatch.setattr("runner.job.job.plan", look)
    config = replace(configured(), tracking=TrackingConfig())
    outcome = run_job(config, replace(identity(here, sweep=SWEEP), key="0123"))
    assert outcome.status == "failed"
    assert (seen[0].status, seen[0].tags["config_key"]) == ("RUNNING", "0123")
    assert seen[0].tags["sweeps"] == " abcd "
    assert config_from_tags(seen[0].tags) == config
    assert "outcome" not in seen[0].tags


@pytest.mark.usefixtures("store")
def test_a_job_with_a_meaningless_configuration_is_logged_too(here: Path) -> None:
    job = replace(
        identity(here, sweep=SWEEP),
        overrides=("mode=size_based", "model.batch_size=x"),
        key="0123",
        tracking=TrackingConfig(),
    )
    outcome = keep_failure(None, job, SpecError("model.batch_size=x is\nno number"))
    assert outcome == Outcome("failed", "model.batch_size=x is no number")
    run = logged(here)
    assert (run.status, run.tags["outcome"], run.tags["config_key"]) == ("FAILED", "failed", "0123")
    assert run.tags["error"].split() == ["model.batch_size=x", "is", "no", "number"]
    assert (run.params["mode"], run.params["model.batch_size"]) == ("size_based", "x")
    assert result(job)["error"] == outcome.error


def test_without_a_tracker_the_result_is_in_its_file_alone(here: Path) -> None:
    job = identity(here, sweep=SWEEP)
    outcome = keep_failure(None, job, SpecError("no"))
    assert outcome == Outcome("failed", "no")
    assert (result(job)["status"], result(job)["key"]) == ("failed", None)


def test_on_its_own_it_leaves_no_folder(here: Path) -> None:
    job = identity(here)
    job.folder.mkdir(parents=True)  # as Hydra does
    assert keep_failure(None, job, SpecError("no")) == Outcome("failed", "no")
    assert not job.folder.exists()
    job.folder.mkdir()
    (job.folder / "of_the_user.txt").touch()
    keep_failure(None, job, SpecError("no"))
    assert [file.name for file in job.folder.iterdir()] == ["of_the_user.txt"]


def test_a_broken_store_does_not_hide_the_error(here: Path) -> None:
    (here / "file").touch()
    tracking = TrackingConfig(uri=f"sqlite:///{here / 'file' / 'runs.db'}")
    outcome = keep_failure(None, replace(identity(here), tracking=tracking), SpecError("no"))
    assert outcome.error is not None
    assert outcome.error.startswith("no; ")
    assert "runs.db" in outcome.error
    assert "\n" not in outcome.error


def test_a_bug_is_kept_in_a_sweep_and_raised_alone(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def crash(*_: object) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(job_files, "write_figures", crash)
    with pytest.raises(ZeroDivisionError):
        run_job(configured(), identity(here, "alone"))
    job = identity(here, sweep=SWEEP)
    outcome = run_job(configured(), job)
    assert (outcome.status, outcome.metrics) == ("failed", {})
    where = "outputs/job/traceback.txt"
    assert outcome.error == f"ZeroDivisionError: a bug; traceback in {where}"
    assert "in crash" in (here / where).read_text()


def test_an_unknown_model_has_no_key(here: Path) -> None:
    job = identity(here)
    outcome = run_job(configured("model.factory=nowhere:build"), job)
    assert outcome.status == "failed"
    assert "there is no module nowhere" in str(outcome.error)
    assert result(job)["key"] is None
