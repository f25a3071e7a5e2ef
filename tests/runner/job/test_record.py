"""What is logged of a job: its name, its parameters and its tags."""

import subprocess
import sys
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import pytest

from fxpart.support.host import installed_version
from runner.job.identity import Choices
from runner.job.record import environment_tags, parameters, run_name, sweep_title
from tests.runner.composed import read

CHOICES = Choices("mine", "cost_aware", "2x4gb", "pcie4")
FACTORY = ("model=custom", "model.factory=own:build", "model.name=mine")


def _name(*overrides: str, swept: tuple[str, ...] = ()) -> str:
    return run_name(CHOICES, (*FACTORY, *overrides), swept)


def test_the_name_begins_with_the_swept_values() -> None:
    overrides = ("mode=cost_aware", "devices=2x4gb", "model.batch_size=1", "phase=training")
    swept = ("model.factory_args.layers", "model.batch_size")
    name = _name("model.factory_args.layers=12", *overrides, swept=swept)
    expected = "layers=12 · batch_size=1 · cost_aware · 2x4gb · pcie4 · mine · phase=training"
    assert name == expected
    # In the order of the sweep.
    other = _name("model.factory_args.layers=12", *overrides, swept=swept[::-1])
    assert other.startswith("batch_size=1 · layers=12 · cost_aware · ")


def test_a_swept_choice_is_bare_and_stands_once() -> None:
    swept = ("devices", "mode", "phase")
    name = _name("phase=training", "mode=cost_aware", "devices=2x4gb", swept=swept)
    assert name == "2x4gb · cost_aware · phase=training · pcie4 · mine"


def test_models_of_one_name_are_distinguished_by_the_choices() -> None:
    names = [run_name(CHOICES, (f"model={model}",), ("model",)) for model in ("one", "two")]
    assert names == [f"{model} · cost_aware · 2x4gb · pcie4" for model in ("one", "two")]


def test_keys_with_the_same_last_part_are_longer() -> None:
    overrides = ("a.size.width=1", "b.size.width=2", "b.depth=3", "devices.nodes.0=4")
    name = _name(*overrides, swept=tuple(arg.partition("=")[0] for arg in overrides))
    assert name.startswith("a.size.width=1 · b.size.width=2 · depth=3 · nodes.0=4 · cost_aware")


@pytest.mark.parametrize(
    ("overrides", "beside"),
    [
        ((), ""),
        (("mode=cost_aware", "devices=2x4gb", "transfer_rate=pcie4"), ""),
        (("model.batch_size=8",), " · batch_size=8"),
        (("++model.batch_size=8",), " · batch_size=8"),
        (("phase=training", "mode.stages=4"), " · phase=training · stages=4"),
        (("tracking=none", "figures=none", "verbose=true", "capture.use_cache=false"), ""),
        (("tracking.uri=postgresql://me:word@host/db", "latency.name=mine", "resume=false"), ""),
        (("mode.assignment='a plan.json'",), " · assignment=a plan.json"),
    ],
)
def test_the_name_of_a_single_run_ends_in_its_further_settings(
    overrides: tuple[str, ...], beside: str
) -> None:
    assert _name(*overrides) == f"cost_aware · 2x4gb · pcie4 · mine{beside}"


def test_names_are_no_longer_than_a_table_shows() -> None:
    path = f"latency.file=/home/{'long/' * 60}times.json"
    name = _name(path, swept=("latency.file",))
    assert name.startswith("file=/home/long/")
    assert "g/times.json · cost_aware" in name
    many = tuple(f"model.factory_args.option_{number}=1" for number in range(60))
    assert len(_name(*many)) == 120
    assert _name(*many).endswith("…")
    assert len(sweep_title("depth", {arg.partition("=")[0]: ["1"] for arg in many})) == 100


def test_a_title_holds_the_name_and_the_swept_keys() -> None:
    values = {"model.factory_args.layers": ["12", "24", "36"], "model.batch_size": ["1", "2"]}
    assert sweep_title("depth", values) == "depth: layers=12,24,36 · batch_size=1,2"
    assert sweep_title("sweep", {"mode": ["a", "b"], "devices": ["c"]}) == (
        "sweep: mode=a,b · devices=c"
    )
    assert sweep_title("sweep", {}) == "sweep"


def test_many_values_are_given_by_their_ends() -> None:
    four = [str(value) for value in (1, 2, 4, 8)]
    assert sweep_title("sweep", {"model.batch_size": four}) == "sweep: batch_size=1,2,4,8"
    longer = {"model.batch_size": [*four, "16", "32"]}
    assert sweep_title("sweep", longer) == "sweep: batch_size=1,2,…,32"


def test_in_little_space_the_ends_or_the_number_is_given() -> None:
    modes = ["size_based", "pipeline", "kl_based", "cost_aware"]
    values = {"mode": modes, "devices": ["1x0.5gb", "2x0.5gb", "4x0.5gb"], "rate": ["a", "b"]}
    more = {**values, "model.config.n_layer": ["12", "24"]}
    assert sweep_title("sweep", more) == (
        "sweep: mode=size_based,…,cost_aware · devices=1x0.5gb,…,4x0.5gb · rate=a,b · n_layer=12,24"
    )
    long = {f"key_{number}": modes for number in range(5)}
    assert sweep_title("sweep", long) == (
        "sweep: key_0 (4) · key_1 (4) · key_2 (4) · key_3 (4) · key_4 (4)"
    )


BASE = ("model=gpt2", "devices=2x16gb")
GPT2 = Choices("gpt2", "kl_based", "2x16gb", "pcie4")


def test_granularity_is_always_a_parameter() -> None:
    assert parameters(read(*BASE), GPT2, ())["granularity"] == "operator"
    override = "granularity=2"
    assert parameters(read(*BASE, override), GPT2, (override,))["granularity"] == "2"


def test_a_recommended_plan_is_one_parameter() -> None:
    config = replace(GPT2, mode="recommend")
    overrides = ("mode=pipeline", "data_parallel=2", "schedule=1f1b", "microbatches=4")
    kept = parameters(read(*BASE, *overrides), config, ())
    assert kept["plan"] == "pipeline data_parallel=2 schedule=1f1b microbatches=4"
    # A job that did not fit has none, nor has one with another mode.
    assert "plan" not in parameters(read(*BASE, "mode=recommend"), config, ())
    assert "plan" not in parameters(read(*BASE, *overrides), GPT2, ())


def test_parameters_hold_every_overridden_value() -> None:
    overrides = (
        *BASE,
        "model.config={n_layer: 3}",
        "model.name=mine",
        "devices.nodes=[0]",
        "transfer_rate.latency_s=1e-6",
        "tracking.uri=http://me:secret@host",
    )
    kept = parameters(read(*overrides), GPT2, overrides)
    assert (kept["model"], kept["devices"]) == ("gpt2", "2x16gb")
    assert (kept["devices.nodes"], kept["transfer_rate.latency_s"]) == ("[0]", "1e-6")
    assert kept["model.config.n_layer"] == 3
    assert not {"model.config", "model.name", "tracking.uri"} & set(kept)


@pytest.mark.parametrize(
    ("overrides", "key", "value"),
    [
        (("objective=throughput",), "objective", "throughput"),
        (("runtime=graph",), "runtime", "graph"),
        (("phase=training", "model.loss=mean"), "model.loss", "mean"),
    ],
)
def test_unusual_values_are_parameters(overrides: tuple[str, ...], key: str, value: str) -> None:
    assert key not in parameters(read(*BASE), GPT2, ())
    assert parameters(read(*BASE, *overrides), GPT2, ())[key] == value


def test_parameters_hold_the_arguments_of_a_factory() -> None:
    config = read("model=custom", "model.factory=a.b:c", "model.factory_args.depth=3")
    kept = parameters(config, GPT2, ())
    assert (kept["model.factory"], kept["model.factory_args.depth"]) == ("a.b:c", 3)


def _git(root: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=t", "-c", "user.email=t@t", "-c", "init.defaultBranch=trunk"]
    command = ["git", "-C", str(root), *identity, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    _git(tmp_path, "init")
    (tmp_path / "file").write_text("1")
    _git(tmp_path, "add", "file")
    _git(tmp_path, "commit", "-m", "one")
    return tmp_path


def _tags_in(folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    monkeypatch.chdir(folder)
    return environment_tags()


def test_versions() -> None:
    tags = environment_tags()
    assert tags["torch_version"] == version("torch")
    assert tags["python_version"] == sys.version.split()[0]
    assert all(tags.values())


def test_a_clean_repository(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tags = _tags_in(repository, monkeypatch)
    assert tags["mlflow.source.git.commit"] == _git(repository, "rev-parse", "HEAD")
    assert tags["mlflow.source.git.branch"] == "trunk"
    assert tags["git_dirty"] == "false"


def test_a_change_makes_it_dirty(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (repository / "file").write_text("2")
    assert _tags_in(repository, monkeypatch)["git_dirty"] == "true"


def test_a_detached_head_has_no_branch(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _git(repository, "checkout", "--detach")
    tags = _tags_in(repository, monkeypatch)
    assert "mlflow.source.git.branch" not in tags
    assert len(tags["mlflow.source.git.commit"]) == 40


def test_no_repository_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "git_dirty" not in _tags_in(tmp_path, monkeypatch)


def test_a_package_that_is_missing_has_no_version() -> None:
    assert installed_version("no-such-package") is None
    assert installed_version("torch") == version("torch")


@pytest.mark.parametrize(
    ("program", "source"),
    [
        ("/x/runner/__main__.py", "python -m runner"),
        ("/x/bin/fxpart", "fxpart"),
        ("", "python"),
    ],
)
def test_source_is_the_command(program: str, source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [program])
    assert environment_tags()["mlflow.source.name"] == source


def test_default_coefficients_are_no_parameters() -> None:
    by_default, chosen = (
        parameters(read(*BASE, "devices=2xh100", *more), GPT2, ())
        for more in ((), ("latency=kernels",))
    )
    assert by_default["latency"] == "auto"
    assert by_default["latency.carries_curves"] is False
    assert not any("curves." in name for name in by_default)
    assert chosen["latency.curves.h100.gemm.launch_s"] == 1.911e-6
