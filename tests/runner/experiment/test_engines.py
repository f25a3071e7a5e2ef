"""Which engines a run's plan is written for, and the line about them."""

from pathlib import Path

import numpy as np
import pytest

from fxpart.core.graph import OpGraph
from fxpart.core.partitions import partition_by_device
from fxpart.core.reserve import Interval
from fxpart.cost.device_memory import DeviceMemory
from fxpart.placement.offload.plan import Offloaded
from fxpart.placement.offload.units import RESIDENT, Unit
from runner.experiment.engines import engines_note, files_for_engines
from runner.experiment.experiment import plan
from runner.experiment.model_spec import model_spec
from runner.experiment.whole_modules import carrier_line, tiered_line
from runner.job.files import write_engine_files
from tests.runner.composed import read
from tests.sketch import Sketch, devices, problem


def _layers(count: int) -> OpGraph:
    """Return layers of two modules each."""
    sketch = Sketch()
    value = sketch.input(1)
    for layer in range(count):
        for part in ("self_attn", "mlp"):
            value = sketch.op([value], 1, [], 1, module=f"model.layers.{layer}.{part}")
    return sketch.graph(value)


GRAPH = _layers(32)
TRAINING = ("model=llama3_1_8b", "phase=training", "devices=8xh100")
STAGES = ("mode=pipeline", "schedule=1f1b", "microbatches=4")


def _note(ends: int, *overrides: str) -> str:
    """Return the line for a plan whose first stage has the operators up to `ends`."""
    placed = partition_by_device(GRAPH, np.arange(GRAPH.n_ops) // ends)
    return engines_note(read(*overrides), GRAPH, placed)


def test_a_sharded_step_is_written_for_three_engines(tmp_path: Path) -> None:
    config = read(*TRAINING, "data_parallel=8", "zero=3", "model.batch_size=16", "mode=single")
    placed = partition_by_device(GRAPH, np.zeros(GRAPH.n_ops, dtype=np.int64))
    write_engine_files(tmp_path, config, GRAPH, placed)
    written = sorted(path.name for path in tmp_path.iterdir())
    assert written == ["accelerate.yaml", "deepspeed.json", "torchtitan.toml"]
    assert "local_batch_size = 2\n" in (tmp_path / "torchtitan.toml").read_text()
    assert engines_note(config, GRAPH, placed) == (
        ", torchtitan (torchtitan.toml), accelerate (accelerate.yaml), DeepSpeed (deepspeed.json); "
        "not Megatron-LM: its distributed optimizer requires zero=1"
    )


def test_a_pipeline_leaves_in_whole_layers() -> None:
    assert _note(32, *TRAINING, *STAGES, "engine=megatron") == ", Megatron-LM (megatron_args.txt)"
    assert _note(32, *TRAINING, *STAGES) == (
        ", torchtitan (torchtitan.toml); not Megatron-LM: its steps are planned with "
        "engine=megatron"
    )
    note = _note(33, *TRAINING, *STAGES)
    assert note == "; no engine files: stage 1 begins inside model.layers.16; add granularity=3"
    already = _note(33, *TRAINING, *STAGES, "granularity=3")
    assert already == "; no engine files: stage 1 begins inside model.layers.16"
    # A pass without a cache is no step of a serving engine, so their limits are not mentioned.
    assert _note(33, "model=llama3_1_8b", "mode=pipeline", "devices=2xh100") == ""


def test_a_step_of_serving_is_written_for_vllm_and_llama_cpp() -> None:
    decode = ("model=llama3_1_8b", "phase=decode", "context_len=4096", "devices=2xh100")
    assert _note(30, *decode) == ", vLLM (vllm.sh), llama.cpp (llama_cpp.sh)"
    placed = partition_by_device(GRAPH, (np.arange(GRAPH.n_ops) >= 30).astype(np.int64))
    files = files_for_engines(read(*decode), GRAPH, placed)
    assert files is not None
    command = {engine.name: text for engine, text in files.texts.items()}["vLLM"]
    assert "VLLM_PP_LAYER_PARTITION=15,17 " in command
    assert "--max-model-len 4096" in command
    generate = ("phase=generate", "prompt_len=1000", "output_len=24")
    files = files_for_engines(read("model=llama3_1_8b", *generate, "devices=2xh100"), GRAPH, placed)
    assert files is not None
    assert all("1024" in text for text in files.texts.values())


def test_vllm_may_use_the_memory_that_the_plan_needs() -> None:
    """The driver's context is beside what vLLM counts."""
    config = read("model=llama3_1_8b", "phase=decode", "context_len=4096", "devices=1xh100")
    placed = partition_by_device(GRAPH, np.zeros(GRAPH.n_ops, dtype=np.int64))
    parts = {"tensors": Interval(940, 940, 940), "driver context": Interval(20, 20, 20)}
    files = files_for_engines(config, GRAPH, placed, needs=[DeviceMemory(0, parts, 1000)])
    assert files is not None
    command = {engine.name: text for engine, text in files.texts.items()}["vLLM"]
    assert "--gpu-memory-utilization 0.94 " in command


@pytest.mark.parametrize(("cut_at", "machines"), [(0, 1), (30, 2)])
def test_only_machines_that_a_plan_uses_are_started(cut_at: int, machines: int) -> None:
    """Of two machines with a device each, one stage uses the first, and two stages use both."""
    decode = ("model=llama3_1_8b", "phase=decode", "context_len=4096", "devices=2x1xh100")
    device_of = (np.arange(GRAPH.n_ops) < cut_at) if cut_at else np.ones(GRAPH.n_ops, dtype=bool)
    placed = partition_by_device(GRAPH, 1 - device_of.astype(np.int64))
    files = files_for_engines(read(*decode), GRAPH, placed)
    assert files is not None
    command = {engine.name: text for engine, text in files.texts.items()}["vLLM"]
    assert ("--distributed-executor-backend ray" in command) == (machines == 2)


def test_a_pass_of_prompts_in_turn_is_of_no_more_than_a_replica_has() -> None:
    generate = ("phase=generate", "prompt_len=16", "output_len=8", "prefill_batch=4")
    shared = ("model=llama3_1_8b", "devices=2xh100", "data_parallel=2", "model.batch_size=4")
    placed = partition_by_device(GRAPH, np.zeros(GRAPH.n_ops, dtype=np.int64))
    files = files_for_engines(read(*shared, *generate), GRAPH, placed)
    assert files is not None
    command = {engine.name: text for engine, text in files.texts.items()}["vLLM"]
    assert "--max-num-batched-tokens 32" in command  # two prompts


def test_the_devices_of_every_replica_are_named() -> None:
    """Each replica has a fast device, which holds the first stage, and a slow one."""
    mixed = ("model=llama3_1_8b", "phase=prefill", "devices=2xt4+2xh100", "data_parallel=2")
    placed = partition_by_device(GRAPH, (np.arange(GRAPH.n_ops) < 30).astype(np.int64))
    files = files_for_engines(read(*mixed, "model.batch_size=2"), GRAPH, placed)
    assert files is not None
    command = {engine.name: text for engine, text in files.texts.items()}["vLLM"]
    assert "CUDA_VISIBLE_DEVICES=2,0,3,1 " in command
    assert "--data-parallel-size 2" in command


def test_a_plan_that_no_engine_reproduces_is_written_for_none() -> None:
    late = "backward_order=late_weight_gradients"
    assert _note(64, *TRAINING, "data_parallel=8", "zero=3", "model.batch_size=8", late) == ""
    assert _note(64, *TRAINING) == ""  # one device
    adapters = ("finetune=lora", "schedule=1f1b", "microbatches=4")
    assert _note(32, *TRAINING, *adapters, "mode=size_based") == ""
    pipeline = _note(33, *TRAINING, *adapters, "mode=pipeline")
    assert pipeline == "; no engine files: no engine's file covers adapters"
    tiers = ("model=llama3_1_8b", "phase=decode", "devices=2x16gb+host64gb")
    assert _note(32, *tiers) == ", vLLM (vllm.sh), llama.cpp (llama_cpp.sh)"  # nothing is in them


def test_a_step_of_megatron_is_run_by_megatron_alone() -> None:
    config = read(*TRAINING, *STAGES, "engine=megatron")
    this = problem(GRAPH, devices(10**6, 10**6))
    placed = partition_by_device(GRAPH, np.arange(GRAPH.n_ops) // 32)
    assert carrier_line(config, this, placed, None) == "Megatron-LM (megatron_args.txt)"
    inside = partition_by_device(GRAPH, np.arange(GRAPH.n_ops) // 33)
    assert carrier_line(config, this, inside, None).startswith("no engine files: stage 1")


LAYERED = (
    *("model=llama2_7b", "phase=decode", "context_len=16", "reserve=none", "mode=size_based"),
    *("model.dtype=float32", "granularity=3", "model.config.num_hidden_layers=6"),
    *("model.config.hidden_size=64", "model.config.intermediate_size=128"),
    *("model.config.num_attention_heads=2", "model.config.num_key_value_heads=2"),
    *("model.config.vocab_size=64", "devices=1x0.5mb+host8mb"),
)


def test_layers_on_the_host_are_written_for_llama_cpp(tmp_path: Path) -> None:
    config = read(*LAYERED, "offload=host")
    result = plan(config, model_spec(config))
    graph, offloaded = result.captured.graph, result.offloaded
    assert offloaded is not None
    assert tiered_line(config, offloaded, graph).endswith(", llama.cpp (llama_cpp.sh)")
    write_engine_files(tmp_path, config, graph, result.assignment, offloaded=offloaded)
    (script,) = tmp_path.iterdir()
    resident = sum(unit.path.startswith("model.layers") for unit in resident_units(offloaded))
    assert 0 < resident < 6
    assert f"--n-gpu-layers {resident + 1} " in script.read_text()


def test_streamed_layers_are_not_written_for_llama_cpp() -> None:
    config = read(*LAYERED, "offload=prefetch")
    result = plan(config, model_spec(config))
    assert result.offloaded is not None
    line = tiered_line(config, result.offloaded, result.captured.graph)
    assert line.startswith("accelerate (device_map.json")
    assert line.endswith("; not llama.cpp: it streams no weights; add offload=host")


def resident_units(offloaded: Offloaded) -> list[Unit]:
    return [
        unit
        for unit, way in zip(offloaded.units, offloaded.ways.tolist(), strict=True)
        if way == RESIDENT
    ]
