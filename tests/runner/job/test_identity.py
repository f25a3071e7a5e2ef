"""The identity of a run: what is logged of it, and when two runs are the same."""

import inspect
import platform
import shutil
import sys
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path

import pytest

from fxpart.errors import SpecError
from fxpart.support.digest import code_digest
from fxpart.support.host import available_cores, cpu_name
from runner.config.schema import Config
from runner.experiment.model_spec import model_spec
from runner.job import identity
from runner.job.identity import (
    Choices,
    JobIdentity,
    config_key,
    identified,
    inputs_key,
    override_values,
    refuse_changed,
    without_elsewhere,
)
from tests.runner.command import OWN, SMALL
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
        "model.autocast=bfloat16",
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
        "price_per_hour={rtx_a4000: 3}",
        "float8=rowwise",
        "float8.filter_fqns=[lm_head]",
        "async_tensor_parallel=true",
        "loss_parallel=true",
        "reduce_dtype=float32",
    ],
)
def test_settings_that_affect_the_result_change_the_key(override: str) -> None:
    assert key_of(read(*BASE)) != key_of(read(*BASE, override))


def test_every_setting_counts_or_is_known_not_to() -> None:
    source = inspect.getsource(identity)
    unread = {field.name for field in fields(Config) if f"config.{field.name}" not in source}
    # What a job is told, shows and records; the model's key has two, a function reads the prices.
    assert unread == {
        "context_len",
        "figures",
        "finetune",
        "price_per_hour",
        "question",
        "resume",
        "rerun",
        "tracking",
        "verbose",
        "where",
        "zip",
    }


@pytest.mark.parametrize("replicas", ["data_parallel=2", "context_parallel=2", "mode=recommend"])
def test_the_summing_of_gradients_counts_where_there_may_be_replicas(replicas: str) -> None:
    base = key_of(read(*BASE, replicas))
    for setting in ("bucket_bytes=1000", "gradient_as_bucket_view=true"):
        assert key_of(read(*BASE, replicas, f"all_reduce.{setting}")) != base
    assert key_of(read(*BASE, "all_reduce.bucket_bytes=1000")) == key_of(read(*BASE))


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
def test_names_and_places_do_not_change_the_key(override: str) -> None:
    assert key_of(read(*BASE)) == key_of(read(*BASE, override))


@pytest.mark.parametrize(
    ("setting", "counts", "does_not"),
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
def test_settings_of_times_and_runs_count_only_where_they_matter(
    setting: str, counts: str, does_not: str
) -> None:
    base = key_of(read(*BASE, setting))
    assert key_of(read(*BASE, setting, counts)) != base
    assert key_of(read(*BASE, setting, does_not)) == base


def test_a_refused_setting_is_not_the_same_as_a_valid_one() -> None:
    # Without a tier, `offload` decides nothing.
    valid, same, refused = (read(f"offload.cache={cache}") for cache in ("none", "auto", "all"))
    assert key_of(valid) == key_of(same)
    assert key_of(refused) != key_of(valid)


def test_shares_of_the_peaks_count() -> None:
    # They also decide which devices are alike, whatever the source of times.
    shares = "++devices.pools.0.efficiency={gemm: {float32: 0.5}}"
    for settings in (("latency=roofline",), ("latency=profiled",)):
        assert key_of(read(*BASE, *settings)) != key_of(read(*BASE, *settings, shares))


def test_default_times_are_those_of_the_chosen_source() -> None:
    by_default, roofline = (
        {d: key_of(read(*BASE, f"devices=2x{d}", *more)) for d in ("t4", "h100")}
        for more in ((), ("latency=roofline",))
    )
    assert by_default["t4"] == roofline["t4"]
    assert by_default["h100"] != roofline["h100"]


def test_a_calibration_counts_by_its_contents(tmp_path: Path) -> None:
    """How its own model would be measured does not count: nothing is measured."""
    for name, text in (("a", "one"), ("b", "one"), ("c", "two")):
        (tmp_path / name).write_text(text)
    calibrated = [*BASE, "latency=calibrated"]
    keys = [key_of(read(*calibrated, f"latency.file={tmp_path}/{name}")) for name in "abc"]
    assert keys[0] == keys[1] != keys[2]
    assert key_of(read(*calibrated)) not in keys
    for unused in ("device=cuda", "threads=2", "repeats=2"):
        overrides = [*calibrated, f"latency.file={tmp_path}/a", f"latency.{unused}"]
        assert key_of(read(*overrides)) == keys[0]


@pytest.mark.parametrize(
    ("setting", "device"),
    [
        ("latency=roofline", None),
        ("latency=calibrated", "cpu"),
        ("latency=profiled", "cpu"),
        ("execute=local", "cpu"),
    ],
)
def test_the_machine_counts_where_times_are_measured(
    monkeypatch: pytest.MonkeyPatch, setting: str, device: str | None
) -> None:
    config, devices = read(*BASE, setting), []

    def elsewhere(device: str) -> dict[str, object]:
        devices.append(device)
        return {"cpu": "another"}

    before = key_of(config)
    monkeypatch.setattr(identity, "_machine", elsewhere)
    assert (key_of(config) != before) == bool(device)
    assert devices == [device] * bool(device)


def test_a_calibration_from_a_file_is_the_same_on_any_machine(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "a").touch()
    config = read(*BASE, "latency=calibrated", f"latency.file={tmp_path}/a")
    before = key_of(config)
    monkeypatch.setattr(identity, "_machine", lambda _: {"cpu": "another"})
    assert key_of(config) == before


def test_a_machine_is_identified_by_its_device() -> None:
    on_cpu, on_gpu = identity._machine("cpu"), identity._machine("cuda")
    assert on_cpu["architecture"] == platform.machine() == on_gpu["architecture"]
    assert (on_cpu["cpu"], on_cpu["cores"]) == (cpu_name(), available_cores())
    assert "gpus" in on_gpu


def test_names_of_accelerators_do_not_count() -> None:
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


@pytest.fixture
def house(tmp_path: Path, graph_cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A copy of both packages that keys depend on."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(graph_cache))
    for place in (identity._FXPART, identity._EXPERIMENT.parent):
        shutil.copytree(place, tmp_path / place.name, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(identity, "_FXPART", tmp_path / "fxpart")
    monkeypatch.setattr(identity, "_EXPERIMENT", tmp_path / "runner" / "experiment")
    code_digest.cache_clear()
    yield tmp_path
    code_digest.cache_clear()


def edited_key(config: Config, file: Path, line: str) -> str:
    with file.open("a") as source:
        source.write(f"{line}\n")
    code_digest.cache_clear()
    return key_of(config)


@pytest.mark.parametrize(
    ("file", "planned", "run"),
    [
        ("fxpart/core/graph.py", True, True),
        ("fxpart/capture/builder.py", True, True),
        ("fxpart/cost/roofline.py", True, True),
        ("fxpart/placement/search/refine.py", True, True),
        ("fxpart/schedule/simulate.py", True, True),
        ("fxpart/support/random_numbers.py", True, True),
        ("fxpart/support/compiled.py", True, True),
        ("runner/experiment/headline.py", True, True),
        ("fxpart/execution/local.py", False, True),
        ("fxpart/plan_export/device_map.py", False, False),
        ("fxpart/torch_compat/split_module.py", False, False),
        ("fxpart/support/whole_file.py", False, False),
        ("runner/output/terminal.py", False, False),
        ("runner/job/job.py", False, False),
    ],
)
def test_an_edit_of_code_that_affects_a_result_changes_its_key(
    house: Path, file: str, planned: bool, run: bool
) -> None:
    """For plans carried out on this machine, the code that does so counts too."""
    assert (house / file).is_file()
    plan, executed = read(*BASE), read(*BASE, "execute=local")
    keys = [key_of(plan), key_of(executed)]
    assert edited_key(plan, house / file, "# edited") == keys[0]
    assert edited_key(plan, house / file, '"""Edited."""') == keys[0]
    assert (edited_key(plan, house / file, "EDITED = True") != keys[0]) is planned
    assert (key_of(executed) != keys[1]) is run


def test_every_package_that_affects_a_result_exists() -> None:
    assert all((identity._FXPART / room).exists() for room in identity._DECIDING)
    assert all((identity._FXPART / room).is_dir() for room in identity._MEASURING)


def test_the_description_of_a_run_leaves_out_its_store() -> None:
    overrides = ["mode=a", "tracking=none", "tracking.uri=x", "+tracking.uri=x", "~hydra.a"]
    overrides += ["hydra/launcher=ray", "trackings=1", "model.tracking=2"]
    overrides += ["++tracking={uri: x}", "tracking@here=none", "+tracking/x=y"]
    assert without_elsewhere(overrides) == ("mode=a", "trackings=1", "model.tracking=2")
    assert without_elsewhere(overrides, ["hydra"]) == tuple(
        arg for arg in overrides if "hydra" not in arg
    )


def test_a_saved_placement_counts_by_its_contents(tmp_path: Path) -> None:
    overrides = [*BASE, "mode=aot_based"]
    for name, text in (("a", "one"), ("b", "one"), ("c", "two")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "assignment.json").write_text(text)
    keys = [key_of(read(*overrides, f"mode.assignment={tmp_path}/{name}")) for name in "abc"]
    assert keys[0] == keys[1] != keys[2]
    direct = key_of(read(*overrides, f"mode.assignment={tmp_path}/a/assignment.json"))
    assert direct == keys[0]
    gone = [key_of(read(*overrides, f"mode.assignment=gone/{name}")) for name in "ab"]
    assert gone[0] != gone[1]


def test_modules_placed_by_hand_count_with_numbers_among_their_paths() -> None:
    overrides = [*BASE, "mode=aot_based"]
    keys = [key_of(read(*overrides, f"mode.modules={{0: {home}, *: 0}}")) for home in (0, 1)]
    assert keys[0] != keys[1]


def test_overrides_lose_their_marks_and_quotes() -> None:
    overrides = ["transfer_rate='16e9'", "+a.b=c=d", "~e", "f="]
    assert override_values(overrides) == {
        "transfer_rate": "16e9",
        "a.b": "c=d",
        "e": "",
        "f": "",
    }


def test_an_unknown_model_is_refused_when_it_is_built(tmp_path: Path) -> None:
    config = read("model=custom", "model.factory=nowhere_at_all:f", "model.name=mine")
    job = JobIdentity(CHOICES, (), tmp_path, tmp_path)
    assert identified(config, job) == job


@pytest.fixture
def here(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's folder, with a model in it that this process has not imported."""
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, "tiny", raising=False)  # another test's
    return folder


def test_a_source_that_changed_meanwhile_is_refused(here: Path) -> None:
    config = read(*OWN, SMALL, "mode=size_based", "tracking=none")
    job = identified(config, JobIdentity(CHOICES, (), here, here))
    assert identified(config, job) is job
    refuse_changed(config, job)
    source = here / "tiny.py"
    before = source.read_text()
    source.write_text(f"{before}\n# edited\n")
    refuse_changed(config, job)
    source.write_text(f"{before}\nEDITED = True\n")
    with pytest.raises(SpecError, match="was changed after the start: a source file"):
        refuse_changed(config, job)
    source.write_text(before)
    refuse_changed(config, job)


def test_a_changed_file_that_the_model_depends_on_is_refused(here: Path) -> None:
    (here / "layers.json").write_text("6")
    config = read(*OWN, SMALL, "model.depends_on=[layers.json]")
    job = identified(config, JobIdentity(CHOICES, (), here, here))
    refuse_changed(config, job)
    assert job.key != identified(read(*OWN, SMALL), JobIdentity(CHOICES, (), here, here)).key
    (here / "layers.json").write_text("3")
    with pytest.raises(SpecError, match="a file that the configuration names, fxpart"):
        refuse_changed(config, job)
    (here / "layers.json").unlink()
    with pytest.raises(SpecError, match=r"model\.depends_on: cannot read layers\.json \(No such"):
        refuse_changed(config, job)
    # For a job that starts with it, the refusal comes when the job runs.
    assert identified(config, JobIdentity(CHOICES, (), here, here)).key is None
