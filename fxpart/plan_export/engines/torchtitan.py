"""Export a plan as torchtitan's TOML: ``torchtitan.config.job_config`` of releases 0.2."""

import json

from fxpart.errors import SpecError
from fxpart.plan_export.engines.plan import EnginePlan

__all__ = ["torchtitan_toml"]

_FLAVORS = {
    # The class of transformers and its `_SIZES`: name and flavor
    ("LlamaForCausalLM", 128256, 4096, 14336, 32, 32, 8): ("llama3", "8B"),
    ("LlamaForCausalLM", 128256, 8192, 28672, 80, 64, 8): ("llama3", "70B"),
    ("LlamaForCausalLM", 128256, 16384, 53248, 126, 128, 8): ("llama3", "405B"),
    ("Qwen3ForCausalLM", 151936, 4096, 12288, 36, 32, 8): ("qwen3", "8B"),
    ("Qwen3ForCausalLM", 151936, 5120, 17408, 40, 40, 8): ("qwen3", "14B"),
    ("Qwen3ForCausalLM", 151936, 5120, 25600, 64, 64, 8): ("qwen3", "32B"),
}
_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
)
_ALIKE = {
    "head_dim": 128,
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
}
"""Values of all flavors, and the defaults of transformers' classes at these sizes."""
_CHECKPOINTING: dict[str, dict[str, object]] = {
    "none": {"mode": "none"},
    "block": {"mode": "full"},
    "selective": {"mode": "selective", "selective_ac_option": "op"},
}
_SCHEDULES = {"gpipe": "GPipe", "1f1b": "1F1B", "interleaved": "Interleaved1F1B"}
_OPTIMIZERS = {"adam": "Adam", "adamw": "AdamW"}
_CONTEXT_DEGREE = "context_parallel_degree"
_CONTEXT: dict[str, object] = {"context_parallel_rotate_method": "allgather"}
_ASYNC = "enable_async_tensor_parallel"
_REDUCE_DTYPE = "float32"
"""The only dtype of its gradients, ``mixed_precision_reduce``."""
_REDUCED = f"reduce_dtype={_REDUCE_DTYPE}"
_REGIONAL = "runtime.regional=true runtime.compiled_loss=true"
_WHOLE_LOSS = "disable_loss_parallel"
_FLOAT8 = "quantize.linear.float8"
_FQNS = {"lm_head": "output"}
"""torchtitan's names of modules, by those of transformers."""
_RESHARD = {0: "default", 2: "never", 3: "always"}


def torchtitan_toml(plan: EnginePlan) -> str:
    """Return the file for ``-m torchtitan.train --job.config_file``.

    Raises:
        SpecError: if torchtitan cannot run the plan.

    """
    name, flavor = _flavor(plan)
    _refuse(plan)
    if plan.stages.count > 1 and name != "llama3":
        raise SpecError(f"it has no pipeline for {name}")
    sharded, order = plan.zero > 0, plan.visible_devices(stages_first=True)
    sections: dict[str, dict[str, object]] = {
        "model": {"name": name, "flavor": flavor, **_converters(plan)},
        "optimizer": {
            "name": _OPTIMIZERS[plan.optimizer],
            "implementation": plan.implementation.replace("_", "-"),
        },
        "training": {
            **_batch_sizes(plan),
            **({"seq_len": plan.tokens} if plan.tokens else {}),
            "dtype": plan.dtype,
            "mixed_precision_param": plan.dtype,
        },
        "parallelism": {
            "data_parallel_replicate_degree": 1 if sharded else plan.data_parallel,
            "data_parallel_shard_degree": plan.data_parallel if sharded else 1,
            "fsdp_reshard_after_forward": _RESHARD[plan.zero],
            "tensor_parallel_degree": plan.tensor_parallel,
            # By default it computes the loss from shards.
            **({_WHOLE_LOSS: not plan.loss_parallel} if plan.tensor_parallel > 1 else {}),
            **({_ASYNC: True} if plan.async_tensor_parallel else {}),
            "pipeline_parallel_degree": plan.stages.ranks,
            **(_CONTEXT | {_CONTEXT_DEGREE: cp} if (cp := plan.context_parallel) > 1 else {}),
            **(_pipeline(plan) if plan.stages.count > 1 else {}),
        },
        "activation_checkpoint": _CHECKPOINTING[plan.checkpointing],
        **_compiled(plan),
    }
    launch = f"# {f'CUDA_VISIBLE_DEVICES={order} ' if order else ''}torchrun --nproc_per_node=..."
    lines = [f"{launch} -m torchtitan.train, {plan.devices} processes in all"]
    if plan.zero and (plan.reduce_dtype or plan.dtype) != _REDUCE_DTYPE:
        lines.append(f"# It sums gradients in {_REDUCE_DTYPE}, unlike this plan: {_REDUCED}")
    if plan.compiled == "whole":
        lines.append(f"# It compiles each block by itself, unlike this plan: {_REGIONAL}")
    for title, values in sections.items():
        lines += ["", f"[{title}]", *(f"{key} = {json.dumps(v)}" for key, v in values.items())]
    return "\n".join(lines) + "\n"


def _flavor(plan: EnginePlan) -> tuple[str, str]:
    sizes = (plan.architecture, *(plan.model.get(key) for key in _SIZES))
    stated = {key: plan.model.get(key) for key in _ALIKE}
    has_defaults = all(value in (None, _ALIKE[key]) for key, value in stated.items())
    for known, flavor in _FLAVORS.items():
        if known == sizes and has_defaults:
            return flavor
    raise SpecError("it has no flavor with these sizes")


def _converters(plan: EnginePlan) -> dict[str, object]:
    return {"converters": [_FLOAT8]} if plan.float8 != "none" else {}


def _compiled(plan: EnginePlan) -> dict[str, dict[str, object]]:
    """Return the sections of what needs a compiled model."""
    sections: dict[str, dict[str, object]] = {}
    if plan.float8 != "none":
        unknown = [fqn for fqn in plan.filter_fqns if fqn not in _FQNS]
        if unknown:
            raise SpecError(f"it has another name for the layers {unknown[0]}")
        filter_fqns = [_FQNS[fqn] for fqn in plan.filter_fqns]
        sections[_FLOAT8] = {"recipe_name": plan.float8, "filter_fqns": filter_fqns}
    if plan.compiled != "none":
        components = ["model"] if plan.compiled == "blocks" else ["model", "loss"]
        sections["compile"] = {"enable": True, "components": components}
    return sections


def _refuse(plan: EnginePlan) -> None:
    """Refuse plans that its configuration cannot express."""
    if plan.zero == 1:
        raise SpecError("it has no ZeRO-1")
    if plan.context_parallel > 1 and not plan.zero:
        raise SpecError("its context parallelism requires zero=2 or 3")
    if plan.data_parallel > 1 and not plan.zero and plan.devices > plan.data_parallel:
        raise SpecError("it does not replicate groups or pipelines; use zero=3")
    if plan.tensor_parallel > 1 and not plan.sequence_parallel:
        raise SpecError("its tensor parallelism requires sequence_parallel=true")
    if plan.stages.count > 1 and plan.schedule not in _SCHEDULES:
        raise SpecError("it needs schedule=1f1b, gpipe or interleaved")
    if plan.checkpointing not in _CHECKPOINTING:
        raise SpecError("it supports only checkpointing=block, selective or none")
    if plan.optimizer not in _OPTIMIZERS or not plan.same_dtype:
        raise SpecError("it supports only Adam and AdamW in the dtype of the weights")


def _batch_sizes(plan: EnginePlan) -> dict[str, object]:
    """Return batch sizes, which without a pipeline imply gradient accumulation."""
    if plan.stages.count > 1 or plan.microbatches == 1:
        return {"local_batch_size": plan.batch_size * plan.microbatches}
    global_batch_size = plan.batch_size * plan.data_parallel * plan.microbatches
    return {"local_batch_size": plan.batch_size, "global_batch_size": global_batch_size}


def _pipeline(plan: EnginePlan) -> dict[str, object]:
    """Return the modules of each stage by torchtitan's names, and the schedule."""
    stages: list[list[str]] = []
    first = 0
    for layers in plan.stages.layers:
        stages.append([f"layers.{index}" for index in range(first, first + layers)])
        first += layers
    stages[0].insert(0, "tok_embeddings")
    stages[-1] += ["norm", "output"]
    return {
        "module_fqns_per_model_part": stages,
        "pipeline_parallel_schedule": _SCHEDULES[plan.schedule],
        "pipeline_parallel_microbatch_size": plan.batch_size,
    }
