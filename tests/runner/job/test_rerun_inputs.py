"""Repeating a run whose files have changed or are gone."""

import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from fxpart.cost.calibration import Calibration, write_calibration
from fxpart.errors import SpecError
from runner.config.schema import Config, TrackingConfig
from runner.config.tags import config_from_tags
from runner.job.files import kept_name, named_files
from runner.job.identity import Choices, JobIdentity
from runner.job.job import Outcome, run_job
from runner.job.rerun import Restored, rerun
from runner.tracking.open_tracker import open_tracker
from runner.tracking.tracker import LoggedRun
from tests.runner.command import OWN, SMALL, run
from tests.runner.composed import read

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:mlflow")

FILES = {
    "mode.assignment": ("mode=aot_based", "mode.assignment=plan.json"),
    "latency.file": ("mode=size_based", "latency=calibrated", "latency.file=here.json"),
}
CHOICES = Choices("tiny", "size_based", "2x0.06mb", "pcie4")


@pytest.fixture
def here(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a saved assignment and a calibration, in which a single job has run."""
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    write_files(folder)
    return folder


def write_files(folder: Path) -> None:
    """Run a job in the current `folder`; save its assignment, and a calibration."""
    planned = read(*OWN, SMALL, "mode=size_based", "tracking=none")
    first = JobIdentity(CHOICES, (), folder / "outputs" / "first", folder)
    assert run_job(planned, first).error is None
    shutil.copy(first.folder / "assignment.json", "plan.json")
    write_calibration(
        Path("here.json"), Calibration(1e-6, 2e-6, 1e9, {"gemm float32": 1e10}, "a CPU")
    )


def ran(
    here: Path, *overrides: str, tracking: TrackingConfig | None = None
) -> tuple[Outcome, LoggedRun]:
    """Run a job and return its outcome, and the newest run in the store."""
    typed = (*OWN, SMALL, *overrides)
    config = replace(read(*typed), tracking=tracking or TrackingConfig())
    done = run_job(config, JobIdentity(CHOICES, typed, here / "outputs" / "job", here))
    return done, newest(here, config.tracking)


def newest(here: Path, tracking: TrackingConfig | None = None) -> LoggedRun:
    return open_tracker(tracking or TrackingConfig(), here).runs({"kind": "run"})[-1]


def again(here: Path, run_id: str, name: str = "again") -> tuple[Outcome, LoggedRun]:
    """Repeat it in the folder `name`, and return the outcome and the newest run."""
    outcome = rerun(*asked_again(here, run_id, name))
    return outcome, newest(here)


def asked_again(here: Path, run_id: str, name: str, *overrides: str) -> tuple[Config, JobIdentity]:
    typed = (f"rerun={run_id}", *overrides)
    return read(*typed), JobIdentity(CHOICES, typed, here / "outputs" / name, here)


def file_of(run: LoggedRun, key: str) -> str:
    """Return the file that the run's configuration names."""
    return str(named_files(config_from_tags(run.tags))[key])


def costs(outcome: Outcome) -> Mapping[str, float]:
    return {name: value for name, value in outcome.metrics.items() if not name.endswith("_s")}


@pytest.mark.usefixtures("store")
@pytest.mark.parametrize("change", ["gone", "changed"])
@pytest.mark.parametrize("key", list(FILES))
def test_the_contents_of_the_first_run_are_read(
    here: Path, key: str, change: str, capsys: pytest.CaptureFixture[str]
) -> None:
    first, was = ran(here, *FILES[key])
    assert first.error is None
    file = here / file_of(was, key)
    content = file.read_bytes()
    if change == "gone":
        file.unlink()
    else:
        file.write_bytes(content.replace(b"1", b"2"))
    shutil.rmtree(here / "outputs" / "job")
    capsys.readouterr()
    second, now = again(here, was.run_id)
    shown = capsys.readouterr().out
    state = "is gone" if change == "gone" else "has changed since"
    assert f"rerun:     {key}={file.name} {state}; read as the run has kept it" in shown
    assert f"rerun:     the same as {was.run_id} in latency_ms" in shown
    assert "an input of its result has changed" not in shown
    assert costs(second) == costs(first)
    assert now.tags["config_key"] == was.tags["config_key"]
    copy = f"outputs/again/{kept_name(key)}"
    assert file_of(now, key) == now.params[key] == copy
    assert (here / copy).read_bytes() == content
    assert f'"{key}={copy}"' in now.tags["overrides"]
    assert f"{key}={file.name}" not in now.tags["overrides"]
    # And so on: a repetition of that run, whose folder is gone too.
    shutil.rmtree(here / "outputs" / "again")
    third, last = again(here, now.run_id, "third")
    assert costs(third) == costs(first)
    assert file_of(last, key) == f"outputs/third/{kept_name(key)}"
    assert f"{copy} is gone; read as" in capsys.readouterr().out


@pytest.mark.usefixtures("store")
def test_an_unchanged_file_is_named_as_before(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, was = ran(here, *FILES["mode.assignment"], *FILES["latency.file"][1:])
    # The store's copies are not used: they are spoiled.
    for copy in (here / "outputs" / "mlartifacts").rglob("inputs/*"):
        copy.write_text("spoiled")
    _, now = again(here, was.run_id)
    assert now.params == was.params
    assert now.tags["overrides"] == was.tags["overrides"]
    assert "read as the run has kept it" not in capsys.readouterr().out
    kept = sorted(path.name for path in (here / "outputs" / "again" / "inputs").iterdir())
    assert kept == ["latency.file.json", "mode.assignment.json"]


@pytest.mark.usefixtures("store")
def test_runs_without_a_result_keep_their_files_and_no_others(here: Path) -> None:
    job = here / "outputs" / "job"
    job.mkdir()
    (job / "memory.svg").touch()  # of an earlier attempt
    infeasible, was = ran(here, *FILES["mode.assignment"], "devices=2x0.04mb")
    assert infeasible.status == "infeasible"
    (kept,) = (here / "outputs" / "mlartifacts").rglob("artifacts")
    assert [path.name for path in kept.iterdir()] == ["inputs"]
    Path("plan.json").write_text("{}")
    repeated, now = again(here, was.run_id)
    assert repeated.status == "infeasible"
    assert now.tags["error"] == was.tags["error"]
    failed, was = ran(here, *FILES["mode.assignment"])
    assert failed.error is not None
    assert "plan.json is not a fxpart.assignment file" in failed.error
    Path("plan.json").unlink()
    repeated, now = again(here, was.run_id)
    assert repeated.error is not None
    assert "mode.assignment.json is not a fxpart.assignment file" in repeated.error


@pytest.mark.usefixtures("store")
def test_a_copy_that_is_missing_or_damaged_is_one_line(here: Path) -> None:
    _, was = ran(here, *FILES["mode.assignment"])
    Path("plan.json").unlink()
    (copy,) = (here / "outputs" / "mlartifacts").rglob("inputs/*")
    copy.write_bytes(copy.read_bytes()[:-1])
    done = run(here, f"rerun={was.run_id}")
    assert done.code == 2
    assert done.error == (
        f"rerun={was.run_id}: mode.assignment=plan.json is gone, and the run's own copy of it in"
        " the store, inputs/mode.assignment.json, is damaged; put the file back, or leave out"
        " rerun= and give another mode.assignment="
    )
    copy.unlink()
    with pytest.raises(SpecError, match=r"inputs/mode\.assignment\.json, is missing; put"):
        again(here, was.run_id)
    shutil.rmtree(copy.parents[2])
    with pytest.raises(SpecError, match=r"inputs/mode\.assignment\.json, is missing; put"):
        again(here, was.run_id)
    assert not (here / "outputs" / "again").exists()


@pytest.mark.usefixtures("store")
def test_a_run_logged_before_files_were_kept_reads_the_current_file(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("runner.job.job.read_inputs", lambda _: ())
    _, was = ran(here, *FILES["latency.file"])
    assert not list((here / "outputs" / "mlartifacts").rglob("inputs"))
    monkeypatch.undo()
    monkeypatch.chdir(here)
    file = here / "here.json"
    file.write_bytes(file.read_bytes().replace(b"1e-06", b"0.5"))
    outcome, now = again(here, was.run_id)
    assert outcome.error is None
    assert "an input of its result has changed: " in capsys.readouterr().out
    assert file_of(now, "latency.file") == "here.json"
    file.unlink()
    outcome, _ = again(here, was.run_id, "third")
    assert outcome.error is not None
    assert "there is no file here.json" in outcome.error


@pytest.mark.usefixtures("store")
def test_a_tag_with_a_file_unknown_to_the_configuration_is_one_line(here: Path) -> None:
    _, was = ran(here, "mode=size_based")
    assert "inputs" not in was.tags
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{here}/outputs/mlflow.db")
    client.set_tag(was.run_id, "inputs", '{"mode.assignment": "0"}')
    with pytest.raises(SpecError, match=r"has read a file mode\.assignment, which its config"):
        again(here, was.run_id)


def test_without_a_store_the_copy_is_in_the_folder(here: Path) -> None:
    config = read(*OWN, SMALL, *FILES["mode.assignment"], "tracking=none")
    done = run_job(config, JobIdentity(CHOICES, (), here / "outputs" / "job", here))
    assert done.error is None
    copy = here / "outputs" / "job" / kept_name("mode.assignment")
    assert copy.read_bytes() == (here / "plan.json").read_bytes()


@pytest.mark.parametrize(
    ("place", "written"), [("a/b-c_d+1.json", "a/b-c_d+1.json"), ("a b=c/d'e", r"'a b=c/d\'e'")]
)
def test_an_override_names_the_other_file(place: str, written: str) -> None:
    files = Restored(Config(), {"mode.assignment": place}, ())
    typed = ("mode=aot_based", "+mode.assignment=x", "latency.file=y")
    expected = ("mode=aot_based", f"+mode.assignment={written}", "latency.file=y")
    assert files.overrides(typed) == expected
    from hydra.core.override_parser.overrides_parser import OverridesParser

    parsed = OverridesParser.create().parse_override(expected[1])
    value = parsed.value()
    assert getattr(value, "text", value) == place
