"""Files of engines: read by the engine's own parser where one is installed here, else by hand."""

import json
import os
import re
import shutil
import subprocess
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest

from fxpart.core.graph import OpGraph
from fxpart.core.phases import CHECKPOINTING
from fxpart.errors import SpecError
from fxpart.plan_export.engines import ENGINES, EnginePlan, Stages, engine_files, stages_of
from tests.plan_export.scene import on_devices
from tests.sketch import Sketch

LLAMA = {
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
}
ROPE = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
WHOLE = Stages((32,), (0,))
TRAINING = EnginePlan(True, WHOLE, "LlamaForCausalLM", LLAMA, tokens=2048)
SERVING = replace(TRAINING, training=False, batch_size=4)
SHARDED = replace(TRAINING, data_parallel=8, zero=3, batch_size=2, checkpointing="block")
PIPELINE = replace(
    TRAINING, stages=Stages((10, 12, 10), (0, 1, 2)), schedule="1f1b", microbatches=8
)
MEGATRON = replace(TRAINING, megatron=True, same_dtype=False)


def text_of(plan: EnginePlan, name: str) -> str:
    return {engine.name: text for engine, text in engine_files(plan).texts.items()}[name]


def _blocks(layers: int) -> OpGraph:
    """Return an embedding, layers of two modules, and a head."""
    sketch = Sketch()
    value = sketch.op([sketch.input(1)], 1, [], 1, module="embed")
    for layer in range(layers):
        for part in ("attention", "mlp"):
            value = sketch.op([value], 1, [], 1, module=f"model.layers.{layer}.{part}")
    value = sketch.op([value], 1, [], 1, module="head")
    return sketch.graph(value)


def test_stages_are_counted_in_whole_layers() -> None:
    graph = _blocks(3)
    whole = stages_of(graph, on_devices(graph, 0, 0, 0, 1, 1, 1, 1, 1))
    assert whole == Stages((1, 2), (0, 1))
    assert stages_of(graph, on_devices(graph, *[1] * 8)) == Stages((3,), (1,))
    with pytest.raises(SpecError, match=r"stage 1 begins inside model\.layers\.1"):
        stages_of(graph, on_devices(graph, 0, 0, 0, 0, 1, 1, 1, 1))
    with pytest.raises(SpecError, match="stage 1 has no whole layer"):
        stages_of(graph, on_devices(graph, *[0] * 7, 1))


def test_float8_layers_are_torchtitans_alone() -> None:
    plan = replace(SHARDED, float8="rowwise", filter_fqns=("lm_head",))
    files = engine_files(plan)
    assert [engine.name for engine in files.texts] == ["torchtitan"]
    assert set(files.refusals.values()) >= {"its file has no float8 layers of torchao"}
    toml = tomllib.loads(text_of(plan, "torchtitan"))
    assert toml["model"]["converters"] == ["quantize.linear.float8"]
    section = toml["quantize"]["linear"]["float8"]
    assert section == {"recipe_name": "rowwise", "filter_fqns": ["output"]}
    unnamed = engine_files(replace(plan, filter_fqns=("mlp.up_proj",)))
    assert not unnamed.texts
    assert "it has another name for the layers mlp.up_proj" in unnamed.refusals.values()


def test_asynchronous_groups_are_torchtitans_alone() -> None:
    groups = replace(SHARDED, tensor_parallel=2, sequence_parallel=True, async_tensor_parallel=True)
    files = engine_files(groups)
    assert [engine.name for engine in files.texts] == ["torchtitan"]
    assert "its file has no asynchronous tensor parallelism of torch" in files.refusals.values()
    toml = tomllib.loads(text_of(groups, "torchtitan"))
    assert toml["parallelism"]["enable_async_tensor_parallel"] is True
    assert "quantize" not in toml


@pytest.mark.parametrize("compiled", ["blocks", "blocks and loss", "whole"])
def test_torchtitan_compiles_blocks(
    compiled: Literal["blocks", "blocks and loss", "whole"],
) -> None:
    components = ["model"] if compiled == "blocks" else ["model", "loss"]
    text = text_of(replace(SHARDED, compiled=compiled), "torchtitan")
    assert tomllib.loads(text)["compile"] == {"enable": True, "components": components}
    note = "# It compiles each block by itself, unlike this plan: runtime.regional=true"
    assert (f"{note} runtime.compiled_loss=true" in text.splitlines()) == (compiled == "whole")
    assert "compile" not in tomllib.loads(text_of(SHARDED, "torchtitan"))


@pytest.mark.parametrize("loss_parallel", [False, True])
def test_losses_of_shards_are_torchtitans_alone_which_has_them_by_default(
    loss_parallel: bool,
) -> None:
    groups = replace(SHARDED, tensor_parallel=2, sequence_parallel=True)
    plan = replace(groups, loss_parallel=loss_parallel)
    assert _parallelism(plan)["disable_loss_parallel"] is not loss_parallel
    refusals = engine_files(plan).refusals.values()
    assert ("its file has no loss_parallel of torch" in refusals) == loss_parallel
    assert "disable_loss_parallel" not in _parallelism(SHARDED)


def test_sums_in_another_dtype_are_torchtitans_alone_which_has_float32() -> None:
    summed = replace(SHARDED, reduce_dtype="float32")
    assert [engine.name for engine in engine_files(summed).texts] == ["torchtitan"]
    assert (
        "fxpart writes no dtype for summing gradients into its file"
        in engine_files(summed).refusals.values()
    )
    note = "# It sums gradients in float32, unlike this plan: reduce_dtype=float32"
    assert note not in text_of(summed, "torchtitan")
    assert note in text_of(SHARDED, "torchtitan").splitlines()


def _parallelism(plan: EnginePlan) -> dict[str, object]:
    section: dict[str, object] = tomllib.loads(text_of(plan, "torchtitan"))["parallelism"]
    return section


@pytest.mark.parametrize("tensor_parallel", [1, 2])
@pytest.mark.parametrize("zero", [2, 3])
def test_accelerate_launches_fsdp2_as_planned(
    zero: int, tensor_parallel: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from accelerate import FullyShardedDataParallelPlugin, ParallelismConfig
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils.launch import prepare_multi_gpu_env

    path = tmp_path / "accelerate.yaml"
    plan = replace(SHARDED, zero=zero, tensor_parallel=tensor_parallel)
    path.write_text(text_of(plan, "accelerate"))
    arguments = launch_command_parser().parse_args([f"--config_file={path}", "train.py"])
    arguments, _, _ = _validate_launch_command(arguments)
    assert arguments.use_fsdp
    assert arguments.num_processes == 8 * tensor_parallel
    assert arguments.mixed_precision == "no"
    for name, value in prepare_multi_gpu_env(arguments).items():
        if name.startswith(("FSDP", "PARALLELISM")):
            monkeypatch.setenv(name, value)
    plugin = FullyShardedDataParallelPlugin()
    assert plugin.fsdp_version == 2
    assert plugin.reshard_after_forward is (zero == 3)
    assert plugin.activation_checkpointing
    if tensor_parallel > 1:
        sizes = ParallelismConfig()
        assert (sizes.tp_size, sizes.dp_shard_size) == (2, 8)


def test_accelerate_launches_replicas(tmp_path: Path) -> None:
    from accelerate.commands.config.config_args import load_config_from_file

    path = tmp_path / "accelerate.yaml"
    path.write_text(text_of(replace(TRAINING, data_parallel=4, machines=2), "accelerate"))
    config = load_config_from_file(str(path))
    assert (config.distributed_type, config.num_processes) == ("MULTI_GPU", 4)
    assert (config.num_machines, config.fsdp_config) == (2, {})


@pytest.mark.parametrize("zero", [1, 3])
def test_deepspeed_has_the_stage_and_the_dtypes(zero: int, tmp_path: Path) -> None:
    from accelerate.utils.deepspeed import HfDeepSpeedConfig

    path = tmp_path / "deepspeed.json"
    path.write_text(text_of(replace(SHARDED, zero=zero), "DeepSpeed"))
    config = HfDeepSpeedConfig(str(path))
    assert config.is_zero3() is (zero == 3)
    assert config.is_zero2() is False
    assert config.get_value("train_batch_size") == 16
    assert config.is_true("bf16.bf16_master_weights_and_grads")
    master = json.loads(text_of(replace(SHARDED, zero=zero, same_dtype=False), "DeepSpeed"))
    assert not master["bf16"]["bf16_master_weights_and_grads"]


def test_torchtitan_has_the_degrees_and_the_modules_of_each_stage() -> None:
    read = tomllib.loads(text_of(SHARDED, "torchtitan"))
    assert read["model"] == {"name": "llama3", "flavor": "8B"}
    assert read["activation_checkpoint"] == {"mode": "full"}
    parallelism = read["parallelism"]
    assert parallelism["data_parallel_shard_degree"] == 8
    assert parallelism["data_parallel_replicate_degree"] == 1
    assert parallelism["fsdp_reshard_after_forward"] == "always"
    assert "pipeline_parallel_schedule" not in parallelism
    read = tomllib.loads(text_of(PIPELINE, "torchtitan"))
    parts = read["parallelism"]["module_fqns_per_model_part"]
    modules = ["tok_embeddings", *(f"layers.{index}" for index in range(32)), "norm", "output"]
    assert [module for part in parts for module in part] == modules
    assert list(map(len, parts)) == [11, 12, 12]
    assert read["parallelism"]["pipeline_parallel_schedule"] == "1F1B"
    assert read["training"]["local_batch_size"] == 8
    assert read["parallelism"]["pipeline_parallel_microbatch_size"] == 1


def test_each_engine_names_degrees_of_experts_and_sequences_its_own_way() -> None:
    longer = replace(SHARDED, data_parallel=2, context_parallel=4)
    titan = tomllib.loads(text_of(longer, "torchtitan"))["parallelism"]
    assert titan["context_parallel_degree"] == 4
    assert titan["context_parallel_rotate_method"] == "allgather"
    assert titan["data_parallel_shard_degree"] == 2
    assert "parallelism_config_cp_size: 4" in text_of(longer, "accelerate")
    assert "num_processes: 8" in text_of(longer, "accelerate")
    mixture = {**LLAMA, "num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": None}
    shared = replace(MEGATRON, data_parallel=8, expert_parallel=4, zero=1, model=mixture)
    mixtral = replace(shared, architecture="MixtralForCausalLM", context_parallel=2)
    arguments = text_of(mixtral, "Megatron-LM").split("\n")
    for line in (
        "--num-experts 8",
        "--moe-router-topk 2",
        "--expert-model-parallel-size 4",
        "--context-parallel-size 2",
        "--moe-token-dispatcher-type alltoall",
    ):
        assert line in arguments
    assert not any(line.startswith("--expert-tensor") for line in arguments)
    split = replace(mixtral, tensor_parallel=2, expert_parallel=8, sequence_parallel=True)
    assert "--expert-tensor-parallel-size 1" in text_of(split, "Megatron-LM").split("\n")
    served = replace(SERVING, data_parallel=4, expert_parallel=4)
    assert "--enable-expert-parallel \\\n" in text_of(served, "vLLM")
    served = replace(SERVING, tensor_parallel=2, data_parallel=4, expert_parallel=8)
    assert "--enable-expert-parallel \\\n" in text_of(served, "vLLM")


def test_megatron_has_the_layers_of_each_chunk_in_turn() -> None:
    stages = Stages((7, 9, 8, 8), (0, 1, 0, 1))
    plan = replace(
        MEGATRON,
        stages=stages,
        schedule="interleaved",
        microbatches=6,
        data_parallel=2,
        zero=1,
        tensor_parallel=4,
        sequence_parallel=True,
    )
    lines = text_of(plan, "Megatron-LM").splitlines()
    arguments = {name: value for name, _, value in (line.partition(" ") for line in lines)}
    layout = arguments["--pipeline-model-parallel-layout"].split("|")
    assert [chunk.count("t") for chunk in layout] == list(stages.layers)
    assert (layout[0][0], layout[-1][-1]) == ("E", "L")
    assert arguments["--pipeline-model-parallel-size"] == "2"
    assert arguments["--tensor-model-parallel-size"] == "4"
    assert arguments["--global-batch-size"] == "12"
    assert arguments["--num-query-groups"] == "8"
    assert {"--sequence-parallel", "--use-distributed-optimizer", "--bf16"} <= set(lines)
    assert "--recompute-granularity" not in arguments


def test_megatron_gets_the_planned_model_and_numbers() -> None:
    base = {key: size for key, size in LLAMA.items() if key != "rope_theta"}
    fields = {"head_dim": 64, "rope_parameters": {**ROPE, "rope_theta": 250000.0}}
    plan = replace(
        MEGATRON, tensor_parallel=2, dtype="float16", model={**base, **fields, "use_cache": False}
    )
    lines = set(text_of(plan, "Megatron-LM").splitlines())
    assert {
        "--kv-channels 64",
        "--rotary-base 250000",
        "--use-rope-scaling",
        "--rope-scaling-factor 32.0",
        "--cross-entropy-loss-fusion",
        "--fp16",
        "--accumulate-allreduce-grads-in-fp32",
    } <= lines
    usual = set(text_of(replace(MEGATRON, tensor_parallel=2), "Megatron-LM").splitlines())
    assert {"--rotary-base 500000", "--cross-entropy-loss-fusion"} <= usual
    assert not any(line.startswith(("--kv-channels", "--use-rope", "--acc")) for line in usual)


def run_script(text: str, program: str, folder: Path) -> tuple[list[str], dict[str, str]]:
    """Run a script with a program that prints its arguments; return these and its variables."""
    script, recorder = folder / "script.sh", folder / program
    script.write_text(text)
    recorder.write_text('#!/bin/sh\nprintf "%s\\n" "$@"; echo ---; env\n')
    recorder.chmod(0o755)
    shell = shutil.which("sh")
    assert shell
    path = f"{folder}{os.pathsep}{os.environ['PATH']}"
    run = subprocess.run(
        [shell, script, "a model"], env={"PATH": path}, capture_output=True, text=True, check=True
    )
    arguments, _, variables = run.stdout.partition("---\n")
    pairs = (line.partition("=") for line in variables.splitlines())
    return arguments.splitlines(), {name: value for name, _, value in pairs}


@pytest.mark.parametrize("checkpointing", CHECKPOINTING)
def test_every_checkpointing_is_exported_as_planned(checkpointing: str) -> None:
    sharded = engine_files(replace(SHARDED, checkpointing=checkpointing))
    megatron = engine_files(replace(MEGATRON, tensor_parallel=2, checkpointing=checkpointing))
    texts = {engine.name: text for engine, text in {**sharded.texts, **megatron.texts}.items()}
    refusals = {
        engine.name: reason for engine, reason in {**sharded.refusals, **megatron.refusals}.items()
    }
    modes = {
        "block": {"mode": "full"},
        "none": {"mode": "none"},
        "selective": {"mode": "selective", "selective_ac_option": "op"},
    }
    if checkpointing in modes:
        section = tomllib.loads(texts["torchtitan"])["activation_checkpoint"]
        assert section == modes[checkpointing]
    else:
        assert refusals["torchtitan"] == "it supports only checkpointing=block, selective or none"
    if checkpointing in ("none", "block"):
        is_block = str(checkpointing == "block").lower()
        assert f"fsdp_activation_checkpointing: {is_block}\n" in texts["accelerate"]
    else:
        assert refusals["accelerate"] == "it supports only checkpointing=block or none"
    if checkpointing == "selective":
        assert refusals["Megatron-LM"] == (
            "it supports only checkpointing=block, core_attention or none"
        )
        return
    granularity = {"block": "full", "core_attention": "selective"}.get(checkpointing, "")
    stated = re.findall(r"--recompute-granularity (\w+)", texts["Megatron-LM"])
    assert "".join(stated) == granularity


def test_microbatches_without_stages_accumulate_gradients() -> None:
    plan = replace(SHARDED, schedule="1f1b", microbatches=4)
    files = engine_files(plan)
    texts = {engine.name: text for engine, text in files.texts.items()}
    sizes = tomllib.loads(texts["torchtitan"])["training"]
    assert (sizes["local_batch_size"], sizes["global_batch_size"]) == (2, 64)
    read = json.loads(texts["DeepSpeed"])
    assert read["train_micro_batch_size_per_gpu"] == 2
    assert read["gradient_accumulation_steps"] == 4
    assert read["train_batch_size"] == 2 * 4 * 8  # DeepSpeed refuses another product
    assert "accelerate" not in texts
    whole = tomllib.loads(text_of(SHARDED, "torchtitan"))["training"]
    assert "global_batch_size" not in whole


DEALT = replace(SHARDED, data_parallel=2, stages=Stages((32,), (1,)), replicas=((0, 2), (1, 3)))


def test_ranks_cover_the_devices_of_every_replica(tmp_path: Path) -> None:
    stages = Stages((20, 12), (1, 0))
    serving = replace(SERVING, stages=stages, data_parallel=2, replicas=((0, 2), (1, 3)))
    _, variables = run_script(text_of(serving, "vLLM"), "vllm", tmp_path)
    assert variables["CUDA_VISIBLE_DEVICES"] == "2,0,3,1"
    pairs = replace(serving, tensor_parallel=2, data_parallel=1, replicas=())
    _, variables = run_script(text_of(pairs, "vLLM"), "vllm", tmp_path)
    assert variables["CUDA_VISIBLE_DEVICES"] == "2,3,0,1"
    # Ranks of torchtitan iterate over replicas before stages.
    dealt = replace(PIPELINE, stages=stages, data_parallel=2, zero=3, replicas=((0, 2), (1, 3)))
    assert "# CUDA_VISIBLE_DEVICES=2,3,0,1 torchrun" in text_of(dealt, "torchtitan")
    in_turn = replace(dealt, stages=Stages((20, 12), (0, 1)))
    assert "CUDA_VISIBLE_DEVICES" not in text_of(in_turn, "torchtitan")
    blocks = replace(in_turn, replicas=((0, 1), (2, 3)))
    assert "# CUDA_VISIBLE_DEVICES=0,2,1,3 torchrun" in text_of(blocks, "torchtitan")


def test_accelerate_launches_on_the_devices_of_the_plan(tmp_path: Path) -> None:
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils.launch import prepare_multi_gpu_env

    path = tmp_path / "accelerate.yaml"
    path.write_text(text_of(DEALT, "accelerate"))
    arguments = launch_command_parser().parse_args([f"--config_file={path}", "train.py"])
    arguments, _, _ = _validate_launch_command(arguments)
    assert prepare_multi_gpu_env(arguments)["CUDA_VISIBLE_DEVICES"] == "2,3"


def test_megatron_gets_the_ranks_of_each_replica() -> None:
    plan = replace(
        MEGATRON, stages=Stages((16, 16), (0, 1)), data_parallel=2, replicas=((0, 1), (2, 3))
    )
    assert "--use-tp-pp-dp-mapping" in text_of(plan, "Megatron-LM").splitlines()
    dealt = replace(plan, replicas=((0, 2), (1, 3)))
    assert "--use-tp-pp-dp-mapping" not in text_of(dealt, "Megatron-LM").splitlines()


@pytest.mark.parametrize(
    "changed",
    [
        {"intermediate_size": 8192},
        {"num_attention_heads": 64},
        {"head_dim": 64},
        {"attention_bias": True},
        {"mlp_bias": True},
        {"tie_word_embeddings": True},
        {"hidden_act": "gelu"},
    ],
)
def test_a_model_of_other_sizes_has_no_flavor(changed: dict[str, object]) -> None:
    files = engine_files(replace(SHARDED, model={**LLAMA, **changed}))
    refusals = {engine.name: reason for engine, reason in files.refusals.items()}
    assert refusals["torchtitan"] == "it has no flavor with these sizes"


REFUSED = [
    (replace(SHARDED, zero=2), "DeepSpeed", "does not shard weights"),
    (replace(SHARDED, zero=1), "torchtitan", "no ZeRO-1"),
    (replace(SHARDED, zero=1), "accelerate", "ZeRO-1 only"),
    (SHARDED, "Megatron-LM", "zero=1"),
    (replace(SHARDED, tensor_parallel=2), "torchtitan", "sequence_parallel=true"),
    (replace(SHARDED, tensor_parallel=2, sequence_parallel=True), "accelerate", "not split"),
    (replace(TRAINING, data_parallel=2, tensor_parallel=2), "accelerate", "zero=2 or 3"),
    (replace(PIPELINE, data_parallel=2), "torchtitan", "does not replicate groups or pipelines"),
    (replace(PIPELINE, schedule="none"), "torchtitan", "schedule=1f1b"),
    (replace(PIPELINE, model={**LLAMA, "vocab_size": 1}), "torchtitan", "no flavor"),
    (replace(PIPELINE, optimizer="sgd"), "torchtitan", "Adam"),
    (PIPELINE, "Megatron-LM", "engine=megatron"),
    (replace(PIPELINE, megatron=True, schedule="gpipe"), "Megatron-LM", "1f1b"),
    (replace(PIPELINE, megatron=True, model={}), "Megatron-LM", "does not state all its sizes"),
    (
        replace(PIPELINE, megatron=True, model={**LLAMA, "mlp_bias": True}),
        "Megatron-LM",
        "mlp_bias=true",
    ),
    (
        replace(PIPELINE, megatron=True, model={**LLAMA, "attention_bias": True}),
        "Megatron-LM",
        "attention_bias=true",
    ),
    (
        replace(PIPELINE, megatron=True, model={**LLAMA, "hidden_act": "gelu"}),
        "Megatron-LM",
        "hidden_act=silu",
    ),
    *(
        (replace(PIPELINE, megatron=True, model={**LLAMA, **fields}), "Megatron-LM", reason)
        for fields, reason in (
            ({"sliding_window": 4096}, "sliding_window of the model"),
            ({"rope_theta": 10000.5}, "whole number"),
            ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "of Llama 3"),
            ({"rope_scaling": {**ROPE, "original_max_position_embeddings": 4096}}, "of Llama 3"),
        )
    ),
    (replace(SHARDED, schedule="1f1b", microbatches=4), "accelerate", "microbatches"),
    (DEALT, "DeepSpeed", "cannot name devices"),
    (replace(DEALT, zero=1, megatron=True), "Megatron-LM", "cannot name devices"),
    (replace(DEALT, machines=2), "accelerate", "other devices than planned"),
    (replace(DEALT, machines=2), "torchtitan", "other devices than planned"),
    (replace(SHARDED, expert_parallel=8), "DeepSpeed", "leaves expert parallelism to the model"),
    (replace(SHARDED, expert_parallel=8), "accelerate", "no setting for expert_parallel"),
    (replace(TRAINING, context_parallel=2), "torchtitan", "zero=2 or 3"),
    (replace(SHARDED, context_parallel=2), "DeepSpeed", "by heads"),
    (replace(SERVING, context_parallel=2), "vLLM", "splits a cache"),
    (replace(SERVING, data_parallel=4, expert_parallel=2), "vLLM", "all of its replicas, 4 dev"),
    (replace(MEGATRON, tensor_parallel=2, expert_parallel=2), "Megatron-LM", "sequence_parallel=t"),
    (replace(SERVING, needed_share=0.97788, free_share=0.97789), "vLLM", "can be given 97.78%"),
    (replace(SERVING, cache="fp8"), "llama.cpp", "no cache in fp8"),
    (replace(SERVING, batch_size=257), "llama.cpp", "at most 256 texts at once, not 257"),
    (replace(SERVING, weights="nf4", group_size=128), "vLLM", "nf4 on loading, in groups of 64"),
    (replace(SERVING, weights="fp8", group_size=128), "vLLM", "fp8 on loading, without groups"),
    (replace(SERVING, architecture="RwkvForCausalLM"), "vLLM", "RwkvForCausalLM is not in"),
    (replace(SERVING, architecture="RwkvForCausalLM"), "llama.cpp", "RwkvForCausalLM is not in"),
    (replace(SERVING, architecture="OPTForCausalLM"), "llama.cpp", "OPTForCausalLM is not in"),
    (replace(SERVING, data_parallel=2), "llama.cpp", "one replica"),
]


@pytest.mark.parametrize(("plan", "name", "reason"), REFUSED)
def test_a_plan_that_an_engine_cannot_execute_has_no_file(
    plan: EnginePlan, name: str, reason: str
) -> None:
    files = engine_files(plan)
    assert name not in {engine.name for engine in files.texts}
    (refusal,) = [why for engine, why in files.refusals.items() if engine.name == name]
    assert reason in refusal


def test_engines_are_offered_only_for_their_purpose() -> None:
    assert engine_files(TRAINING).texts == {}  # one device
    for plan in (SHARDED, PIPELINE, SERVING):
        files = engine_files(plan)
        offered = {*files.texts, *files.refusals}
        assert {engine.trains for engine in offered} == {plan.training}
        assert plan.stages.count == 1 or all(engine.pipelines for engine in offered)
    only_megatron = engine_files(replace(PIPELINE, megatron=True))
    assert [engine.name for engine in only_megatron.texts] == ["Megatron-LM"]
    assert not only_megatron.refusals
    gpt2 = replace(SERVING, architecture="GPT2LMHeadModel", data_parallel=2)
    assert [engine.name for engine in engine_files(gpt2).texts] == ["vLLM"]
    images = replace(SHARDED, architecture="ViTForImageClassification")
    assert [engine.name for engine in engine_files(images).texts] == ["accelerate", "DeepSpeed"]
    assert len({engine.file for engine in ENGINES}) == len(ENGINES)
