"""The files of a job: copies of its input files, and its plan for other tools."""

import json
import runpy
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fxpart.core.assignment import Assignment
from fxpart.core.graph import OpGraph
from fxpart.errors import CacheError, SpecError
from fxpart.plan_export import DeviceMap, device_map, split_points
from runner.config.schema import Config, LatencyConfig, ModeConfig, ModelConfig
from runner.experiment.experiment import plan
from runner.experiment.model_spec import model_spec
from runner.experiment.result import Result
from runner.experiment.whole_modules import carrier_line
from runner.job.files import (
    INPUTS_TAG,
    InputFile,
    inputs_of,
    inputs_tag,
    kept_name,
    named_files,
    read_inputs,
    with_file,
    write_device_map,
    write_inputs,
    write_place_script,
    write_plan,
    write_split_points,
)
from runner.job.identity import Choices, JobIdentity, inputs_key
from tests.runner.composed import read
from tests.runner.pipelines import training_graph
from tests.sketch import Sketch

KEYS = ("mode.assignment", "latency.file")


def naming(assignment: Path, calibration: Path) -> Config:
    return Config(
        model=ModelConfig(name="gpt2", architecture="GPT2LMHeadModel"),
        mode=ModeConfig("aot_based", {"assignment": str(assignment), "devices": {0: 1}}),
        latency=LatencyConfig("calibrated", "calibrated", file=str(calibration)),
    )


@pytest.fixture
def config(tmp_path: Path) -> Config:
    """Two files of one name, one of them named by the folder of the run that wrote it."""
    for name in ("run", "here"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "assignment.json").write_text(name)
    return naming(tmp_path / "run", tmp_path / "here" / "assignment.json")


def test_the_files_are_found_and_read(config: Config, tmp_path: Path) -> None:
    places = [tmp_path / name / "assignment.json" for name in ("run", "here")]
    assert named_files(config) == dict(zip(KEYS, places, strict=True))
    assert read_inputs(config) == (InputFile(KEYS[0], b"run"), InputFile(KEYS[1], b"here"))
    places[0].unlink()
    assert read_inputs(config) == (InputFile(KEYS[1], b"here"),)


@pytest.mark.parametrize(
    ("mode", "options"),
    [
        ("kl_based", {}),
        ("kl_based", {"assignment": "x"}),
        ("aot_based", {"modules": {"": 0}}),
        ("aot_based", {"assignment": None}),
        ("aot_based", {"assignment": 3}),
        ("aot_based", {"assignment": ""}),
    ],
)
def test_a_configuration_without_files_has_none(mode: str, options: dict[str, object]) -> None:
    config = Config(mode=ModeConfig(mode, options))
    assert named_files(config) == {}
    assert read_inputs(config) == ()
    assert inputs_tag(()) == {}


@pytest.mark.parametrize("key", KEYS)
def test_a_job_is_identified_by_the_contents_of_its_files(
    config: Config, key: str, tmp_path: Path
) -> None:
    def known(job_config: Config) -> str:
        return inputs_key(job_config, model_spec(job_config).key())

    elsewhere = tmp_path / "elsewhere.json"
    elsewhere.write_bytes(named_files(config)[key].read_bytes())
    moved = with_file(config, key, str(elsewhere))
    assert named_files(moved) == {**named_files(config), key: elsewhere}
    assert moved.mode.options["devices"] == {0: 1}
    assert known(moved) == known(config)
    elsewhere.write_text("another")
    assert known(moved) != known(config)


def test_copies_are_named_after_the_keys_and_no_others_stay(config: Config, tmp_path: Path) -> None:
    job = tmp_path / "job"
    write_inputs(read_inputs(config), job)
    copies = {key: (job / kept_name(key)).read_text() for key in KEYS}
    assert copies == {KEYS[0]: "run", KEYS[1]: "here"}
    (job / "inputs" / "notes.txt").touch()  # the user's own
    write_inputs([InputFile(KEYS[1], b"new")], job)
    left = {path.name: path.read_text() for path in (job / "inputs").iterdir()}
    assert left == {"latency.file.json": "new", "notes.txt": ""}
    write_inputs((), job)
    assert [path.name for path in (job / "inputs").iterdir()] == ["notes.txt"]


def test_a_job_without_files_has_no_folder_for_them(tmp_path: Path) -> None:
    write_inputs((), tmp_path / "job")
    assert list(tmp_path.iterdir()) == []


def test_copying_a_copy_that_is_already_there_keeps_it(config: Config, tmp_path: Path) -> None:
    job = tmp_path / "job"
    write_inputs(read_inputs(config), job)
    copied = with_file(config, KEYS[0], str(job / kept_name(KEYS[0])))
    write_inputs(read_inputs(copied), job)
    assert (job / kept_name(KEYS[0])).read_text() == "run"


def test_a_folder_that_cannot_be_written_is_one_line(config: Config, tmp_path: Path) -> None:
    (tmp_path / "job").touch()
    with pytest.raises(CacheError, match=r"mode\.assignment\.json: .*; choose another output"):
        write_inputs(read_inputs(config), tmp_path / "job")


def test_a_tag_names_the_files(config: Config) -> None:
    tags = inputs_tag(read_inputs(config))
    assert list(tags) == [INPUTS_TAG]
    digests = [sha256(text).hexdigest() for text in (b"run", b"here")]
    assert inputs_of("1", tags) == dict(zip(KEYS, digests, strict=True))
    assert inputs_of("1", {}) == {}


@pytest.mark.parametrize("text", ["", "{", "[]", "3"])
def test_a_foreign_tag_is_one_line(text: str) -> None:
    with pytest.raises(SpecError, match=r"the tag inputs of run 12 is damaged .* run it again"):
        inputs_of("12", {INPUTS_TAG: text})


def test_another_latency_is_unchanged(config: Config) -> None:
    moved = with_file(config, KEYS[1], "x")
    assert moved.latency == replace(config.latency, file="x")
    assert moved.mode == config.mode


def two_blocks() -> OpGraph:
    """Return two modules of two layers each, with a weight of 10 bytes in every layer."""
    sketch = Sketch()
    value = sketch.input(4)
    for name in ("a.first", "a.last", "b.first", "b.last"):
        value = sketch.op([value], 4, [sketch.weight(10)], 1, module=name)
    graph = sketch.graph(value)
    names = tuple(f"{module}.weight" for module in graph.modules)
    return replace(graph, weight_names=names)


def written(folder: Path, graph: OpGraph, part: list[int], *homes: tuple[int, ...]) -> list[str]:
    plan = Assignment(np.array(part), homes)
    write_device_map(folder, graph, device_map(graph, plan), {})
    write_split_points(folder, graph, plan)
    return sorted(path.name for path in folder.iterdir())


def test_entries_are_only_paths_and_devices(tmp_path: Path) -> None:
    names = written(tmp_path, two_blocks(), [0, 0, 1, 1], (3,), (1,))
    assert names == ["device_map.json", "device_map_notes.json", "split_points.json"]
    assert json.loads((tmp_path / "device_map.json").read_text()) == {"a": 3, "b": 1}
    notes = json.loads((tmp_path / "device_map_notes.json").read_text())
    assert notes["weight_bytes"] == {"1": 20, "3": 20}
    assert (notes["operators"], notes["operators_elsewhere"]) == (4, 0)
    assert json.loads((tmp_path / "split_points.json").read_text()) == {"b.first": "BEGINNING"}


def test_one_device_has_a_map_and_no_split(tmp_path: Path) -> None:
    assert written(tmp_path, two_blocks(), [0] * 4, (0,)) == [
        "device_map.json",
        "device_map_notes.json",
    ]
    assert json.loads((tmp_path / "device_map.json").read_text()) == {"": 0}


def test_a_cut_inside_a_module_leaves_no_split_points(tmp_path: Path) -> None:
    """The first layer ends where no module begins: its second operator goes to another device."""
    sketch = Sketch()
    value = sketch.input(4)
    for name in ("a", "a", "b"):
        value = sketch.op([value], 4, [sketch.weight(10)], 1, module=name)
    graph = sketch.graph(value)
    assert "split_points.json" not in written(tmp_path, graph, [0, 1, 1], (0,), (1,))
    assert "split_points.json" in written(tmp_path, graph, [0, 0, 1], (0,), (1,))


def test_a_training_step_leaves_the_split_points_of_its_forward(tmp_path: Path) -> None:
    graph = training_graph()
    plan = Assignment(np.array([0, 1, 1, 1]), ((0,), (1,)))
    write_split_points(tmp_path, graph, plan)
    points = json.loads((tmp_path / "split_points.json").read_text())
    assert points == split_points(graph, plan) == {"second": "BEGINNING"}
    # A backward that returns to the first device belongs to a stage, and is no further cut.
    back = Assignment(np.array([0, 1, 1, 2]), ((0,), (1,), (0,)))
    assert split_points(graph, back) == points


def test_a_place_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CacheError, match="choose another output folder"):
        written(tmp_path / "file", two_blocks(), [0] * 4, (0,))


def test_a_plan_on_the_processor_loads_a_checkpoint_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The map names no GPU, as accelerate would look for one."""
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes: dict[str, Any] = {
        "n_layer": 1,
        "n_embd": 8,
        "n_head": 2,
        "vocab_size": 16,
        "n_positions": 16,
    }
    overrides = [f"model.config.{name}={size}" for name, size in sizes.items()]
    step = ("model.seq_len=8", "model.batch_size=1", "model.dtype=float32")
    config = read("model=gpt2", "devices=1xcpu", "mode=single", *step, *overrides)
    result = plan(config, model_spec(config))
    identity = JobIdentity(Choices("gpt2", "single", "d", "l"), (), tmp_path / "run", tmp_path)
    write_plan(config, identity, result, model_spec(config).key())
    assert json.loads((tmp_path / "run" / "device_map.json").read_text()) == {"": "cpu"}
    notes = json.loads((tmp_path / "run" / "device_map_notes.json").read_text())
    assert notes["main_device"] == "cpu"
    assert notes["max_memory"] == {"cpu": result.problem.topology.devices[0].total_bytes}
    original = GPT2LMHeadModel(GPT2Config(**sizes))
    original.save_pretrained(tmp_path / "checkpoint")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["place.py", "checkpoint"])
    loaded = runpy.run_path(str(tmp_path / "run" / "place.py"))["model"]
    expected = original.state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in loaded.state_dict().items())
    for changed in ("phase=training", "weights=int8"):
        other = read("model=gpt2", "devices=1xcpu", changed)
        write_place_script(tmp_path / "none", other, result.captured.graph, PLACED)
        assert not (tmp_path / "none").exists()


PLACED = DeviceMap({"": 0}, 0, np.zeros(1, dtype=np.int64), (), (), {0: 1})


def test_a_plan_that_divides_a_module_has_no_script(tmp_path: Path) -> None:
    config = Config(model=ModelConfig(name="gpt2", architecture="GPT2LMHeadModel"))
    write_place_script(tmp_path, config, two_blocks(), replace(PLACED, torn=("a",)))
    assert not (tmp_path / "place.py").exists()


TINY_GPT2: dict[str, Any] = {
    "n_layer": 4,
    "n_embd": 8,
    "n_head": 2,
    "vocab_size": 16,
    "n_positions": 16,
}


def planned(folder: Path, *overrides: str) -> tuple[Path, Result]:
    """Plan a small GPT-2 for a run in `folder`, and write the plan's files."""
    sizes = [f"model.config.{name}={size}" for name, size in TINY_GPT2.items()]
    config = read("model=gpt2", "model.dtype=float32", *sizes, *overrides)
    result = plan(config, model_spec(config))
    identity = JobIdentity(Choices("gpt2", "m", "d", "l"), (), folder / "run", folder)
    write_plan(config, identity, result, model_spec(config).key())
    return folder / "run", result


def test_accelerates_own_placement_fits_beside_all_else_that_the_plan_needs(tmp_path: Path) -> None:
    from accelerate import infer_auto_device_map, init_empty_weights
    from transformers import GPT2Config, GPT2LMHeadModel

    step = ("model.seq_len=8", "model.batch_size=1", "devices=2x0.1mb", "reserve=none")
    run, result = planned(tmp_path, "mode=size_based", "granularity=module", *step)
    notes = json.loads((run / "device_map_notes.json").read_text())
    weights = notes["weight_bytes"]
    for need in result.device_needs:
        beside = need.needed.expected - weights.get(str(need.device), 0)
        assert notes["max_memory"][str(need.device)] == 100_000 - beside
    with init_empty_weights():
        model = GPT2LMHeadModel(GPT2Config(**TINY_GPT2))
    most = {int(place): size for place, size in notes["max_memory"].items()}
    placed = infer_auto_device_map(model, max_memory=most)
    assert set(placed.values()) <= {0, 1}


@pytest.mark.parametrize(("mode", "loads"), [("single", True), ("equal_layers", False)])
def test_the_map_of_a_decode_covers_its_encoder_only_on_one_device(
    mode: str, loads: bool, tmp_path: Path
) -> None:
    sizes = {
        "d_model": 16,
        "d_kv": 8,
        "d_ff": 16,
        "num_layers": 2,
        "num_heads": 2,
        "vocab_size": 32,
    }
    overrides = [f"model.config.{name}={size}" for name, size in sizes.items()]
    step = ("phase=decode", "context_len=8", "model.seq_len=8", "model.batch_size=1")
    config = read("model=t5_large", "devices=2x16gb", f"mode={mode}", *step, *overrides)
    result = plan(config, model_spec(config))
    identity = JobIdentity(Choices("t5", "m", "d", "l"), (), tmp_path / "run", tmp_path)
    write_plan(config, identity, result, model_spec(config).key())
    entries = json.loads((tmp_path / "run" / "device_map.json").read_text())
    assert (set(entries) == {""}) == loads
    assert (tmp_path / "run" / "place.py").exists() == loads
    line = carrier_line(config, result.problem, result.assignment, None)
    assert "accelerate" not in line  # plain PyTorch, or torch's pipelines


def test_a_plan_over_a_gpu_and_a_processor_is_for_no_engine(tmp_path: Path) -> None:
    step = ("model.seq_len=8", "model.batch_size=1", "phase=decode", "context_len=8")
    run, _ = planned(tmp_path, "devices=1x1mb+1xcpu", "mode=equal_layers", "reserve=none", *step)
    entries = json.loads((run / "device_map.json").read_text())
    assert set(entries.values()) == {0, "cpu"}
    assert not list(run.glob("*.sh"))
