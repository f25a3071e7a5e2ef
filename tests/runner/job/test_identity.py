"""What is logged of a run, and what makes two runs the same."""

import platform
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from fxpart.support.host import available_cores, cpu_name
from runner.config.sections import Config
from runner.experiment.experiment import model_spec
from runner.job import identity
from runner.job.identity import (
    Choices,
    config_key,
    inputs_key,
    override_values,
    parameters,
    without_elsewhere,
)
from tests.runner.composed import read

BASE = ("model=gpt2", "devices=2x16gb")
CHOICES = Choices("gpt2", "kl_based", "2x16gb", "pcie4")


def key_of(config: Config) -> str:
    return config_key(config, inputs_key(config, model_spec(config).key()))


@pytest.mark.parametrize(
    "override",
    [
        "model.batch_size=3",
        "model.config.n_layer=3",
        "devices.nodes=[0]",
        "devices=2x24gb",
        "transfer_rate=pcie3",
        "latency.op_overhead_s=0",
        "mode=single",
        "mode.max_passes=1",
        "capture.level=module",
        "granularity=module",
        "granularity=2",
        "devices.saturate_host=true",
        "mode=cost_aware",
    ],
)
def test_what_decides_the_result_changes_the_key(override: str) -> None:
    assert key_of(read(*BASE)) != key_of(read(*BASE, override))


@pytest.mark.parametrize(
    "override",
    [
        "model.name=other",
        "devices.spec=other",
        "transfer_rate.source=other",
        "transfer_rate.name=other",
        "latency.name=other",
        "tracking=none",
        "tracking.experiment=other",
        "capture.cache_dir=/other",
        "capture.use_cache=false",
    ],
)
def test_names_and_places_do_not(override: str) -> None:
    assert key_of(read(*BASE)) == key_of(read(*BASE, override))


@pytest.mark.parametrize(
    ("given", "counts", "does_not"),
    [
        ("latency=profiled", "latency.threads=2", "latency.op_overhead_s=1"),
        ("latency=calibrated", "latency.repeats=2", "latency.op_overhead_s=1"),
        ("latency=roofline", "latency.op_overhead_s=1", "latency.repeats=2"),
        ("execute=local", "execute.seed=1", "execute.timeout_s=9"),
        ("execute=local", "execute.save_stages=true", "execute.timeout_s=9"),
        ("execute=pipeline", "execute.repeats=9", "execute.timeout_s=9"),
        ("execute=none", "execute=local", "execute.repeats=9"),
    ],
)
def test_of_times_and_runs_only_what_changes_them_counts(
    given: str, counts: str, does_not: str
) -> None:
    base = key_of(read(*BASE, given))
    assert key_of(read(*BASE, given, counts)) != base
    assert key_of(read(*BASE, given, does_not)) == base


def test_a_calibration_counts_by_what_it_says(tmp_path: Path) -> None:
    """How its own model would be measured does not count: nothing is."""
    for name, text in (("a", "one"), ("b", "one"), ("c", "two")):
        (tmp_path / name).write_text(text)
    given = [*BASE, "latency=calibrated"]
    keys = [key_of(read(*given, f"latency.file={tmp_path}/{name}")) for name in "abc"]
    assert keys[0] == keys[1] != keys[2]
    assert key_of(read(*given)) not in keys
    for unused in ("device=cuda", "threads=2", "repeats=2"):
        asked = [*given, f"latency.file={tmp_path}/a", f"latency.{unused}"]
        assert key_of(read(*asked)) == keys[0]


@pytest.mark.parametrize(
    ("given", "device"),
    [
        ("latency=roofline", None),
        ("latency=calibrated", "cpu"),
        ("latency=profiled", "cpu"),
        ("execute=local", "cpu"),
    ],
)
def test_the_machine_counts_where_times_are_measured(
    monkeypatch: pytest.MonkeyPatch, given: str, device: str | None
) -> None:
    config, asked = read(*BASE, given), []

    def elsewhere(device: str) -> dict[str, object]:
        asked.append(device)
        return {"cpu": "another"}

    before = key_of(config)
    monkeypatch.setattr(identity, "_machine", elsewhere)
    assert (key_of(config) != before) == bool(device)
    assert asked == [device] * bool(device)


def test_a_calibration_from_a_file_is_the_same_on_any_machine(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "a").touch()
    config = read(*BASE, "latency=calibrated", f"latency.file={tmp_path}/a")
    before = key_of(config)
    monkeypatch.setattr(identity, "_machine", lambda _: {"cpu": "another"})
    assert key_of(config) == before


def test_a_machine_is_told_by_its_device() -> None:
    on_cpu, on_gpu = identity._machine("cpu"), identity._machine("cuda")
    assert on_cpu["architecture"] == platform.machine() == on_gpu["architecture"]
    assert (on_cpu["cpu"], on_cpu["cores"]) == (cpu_name(), available_cores())
    assert "gpus" in on_gpu


def test_names_of_accelerators_do_not() -> None:
    config, renamed = read(*BASE), read(*BASE)
    renamed.devices.pools = [replace(p, name="x", source="y") for p in renamed.devices.pools]
    assert key_of(config) == key_of(renamed)


def test_versions_change_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    config = read(*BASE)
    before = key_of(config)
    other = inputs_key(config, {**model_spec(config).key(), "factory_sha256": "1"})
    assert config_key(config, other) != before
    monkeypatch.setattr(identity, "installed_version", lambda _: None)
    assert key_of(config) != before


def test_a_change_of_the_code_changes_the_key(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    digest = identity._code_digest.__wrapped__
    (tmp_path / "modes").mkdir()
    (tmp_path / "graph.py").write_text("one\n")
    (tmp_path / "modes" / "single.py").write_text("two\n")
    (tmp_path / "notes.txt").write_text("no code\n")
    before = digest(tmp_path)
    (tmp_path / "notes.txt").unlink()
    assert before == digest(tmp_path)
    (tmp_path / "modes" / "single.py").write_text("three\n")
    changed = digest(tmp_path)
    (tmp_path / "modes" / "single.py").rename(tmp_path / "modes" / "double.py")
    assert len({before, changed, digest(tmp_path)}) == 3
    config = read(*BASE)
    key = key_of(config)
    monkeypatch.setattr(identity, "_FXPART", tmp_path)
    assert key_of(config) != key


def test_an_edit_of_what_decides_a_metric_changes_the_key(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config = read(*BASE)
    shutil.copytree(identity._EXPERIMENT, tmp_path, dirs_exist_ok=True)
    monkeypatch.setattr(identity, "_EXPERIMENT", tmp_path)
    identity._code_digest.cache_clear()
    keys = [key_of(config)]
    for edited in ("headline", "replicas"):
        with (tmp_path / f"{edited}.py").open("a") as file:
            file.write("EDITED = True\n")
        identity._code_digest.cache_clear()
        keys.append(key_of(config))
    assert len({*keys}) == 3


def test_what_is_said_of_a_run_leaves_out_where_it_is_kept() -> None:
    given = ["mode=a", "tracking=none", "tracking.uri=x", "+tracking.uri=x", "~hydra.a"]
    given += ["hydra/launcher=ray", "trackings=1", "model.tracking=2"]
    given += ["++tracking={uri: x}", "tracking@here=none", "+tracking/x=y"]
    assert without_elsewhere(given) == ("mode=a", "trackings=1", "model.tracking=2")
    assert without_elsewhere(given, ["hydra"]) == tuple(one for one in given if "hydra" not in one)


def test_a_saved_placement_counts_by_what_it_says(tmp_path: Path) -> None:
    given = [*BASE, "mode=aot_based"]
    for name, text in (("a", "one"), ("b", "one"), ("c", "two")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "assignment.json").write_text(text)
    keys = [key_of(read(*given, f"mode.assignment={tmp_path}/{name}")) for name in "abc"]
    assert keys[0] == keys[1] != keys[2]
    direct = key_of(read(*given, f"mode.assignment={tmp_path}/a/assignment.json"))
    assert direct == keys[0]
    gone = [key_of(read(*given, f"mode.assignment=gone/{name}")) for name in "ab"]
    assert gone[0] != gone[1]


def test_modules_placed_by_hand_count_numbers_among_their_paths_too() -> None:
    given = [*BASE, "mode=aot_based"]
    keys = [key_of(read(*given, f"mode.modules={{0: {home}, *: 0}}")) for home in (0, 1)]
    assert keys[0] != keys[1]


def test_granularity_is_a_parameter_whether_asked_for_or_not() -> None:
    assert parameters(read(*BASE), CHOICES, ())["granularity"] == "operator"
    asked = "granularity=2"
    assert parameters(read(*BASE, asked), CHOICES, (asked,))["granularity"] == "2"


def test_overrides_lose_their_marks_and_quotes() -> None:
    given = ["transfer_rate='16e9'", "+a.b=c=d", "~e", "f="]
    assert override_values(given) == {
        "transfer_rate": "16e9",
        "a.b": "c=d",
        "e": "",
        "f": "",
    }


def test_parameters_hold_what_was_overridden_anywhere() -> None:
    overrides = (
        *BASE,
        "model.config={n_layer: 3}",
        "model.name=mine",
        "devices.nodes=[0]",
        "transfer_rate.latency_s=1e-6",
        "tracking.uri=http://me:secret@host",
    )
    kept = parameters(read(*overrides), CHOICES, overrides)
    assert (kept["model"], kept["devices"]) == ("gpt2", "2x16gb")
    assert (kept["devices.nodes"], kept["transfer_rate.latency_s"]) == ("[0]", "1e-6")
    assert kept["model.config.n_layer"] == 3
    assert not {"model.config", "model.name", "tracking.uri"} & set(kept)


def test_parameters_say_how_a_factory_was_called() -> None:
    config = read("model=custom", "model.factory=a.b:c", "model.factory_args.depth=3")
    kept = parameters(config, CHOICES, ())
    assert (kept["model.factory"], kept["model.factory_args.depth"]) == ("a.b:c", 3)
