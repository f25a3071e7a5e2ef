"""Export a plan as a llama.cpp command."""

from fxpart.errors import SpecError
from fxpart.plan_export.engines.plan import EnginePlan

__all__ = ["llama_cpp_command"]

_CACHE = {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}
_MOST_TEXTS = 256
"""Its ``LLAMA_MAX_SEQ``."""


def llama_cpp_command(plan: EnginePlan) -> str:
    """Return a shell script that serves the GGUF file in its argument.

    With ``--split-mode layer``, the layers and then the output are divided over the devices in
    proportion to ``--tensor-split``, so integers that sum to the number of layers plus one are met
    exactly. Of layers that the host computes there is only a number: ``--n-gpu-layers`` counts the
    others, which come last, and the output.

    Raises:
        SpecError: if llama.cpp cannot run the plan.

    """
    _refuse_unsupported(plan)
    arguments, stages = _arguments(plan), plan.stages
    order = plan.visible_devices()
    environment = [f"CUDA_VISIBLE_DEVICES={order}"] if order else []
    lines = ["#!/bin/sh", "# sh llama_cpp.sh MODEL.gguf"]
    if plan.weights != "none":
        weights = plan.format_text or plan.weights
        lines.append(f"# planned with weights in {weights}: take a GGUF file of that size")
    if stages.hosted != tuple(range(len(stages.hosted))):
        layers = ", ".join(map(str, stages.hosted))
        lines.append(f"# the plan computes layers {layers} on the host; llama.cpp takes its first")
    command = " ".join([*environment, 'exec llama-server --model "${1:?a GGUF file}"'])
    lines.append(" \\\n    ".join([command, *(f"--{k} {v}" for k, v in arguments.items())]))
    return "\n".join(lines) + "\n"


def _refuse_unsupported(plan: EnginePlan) -> None:
    if plan.replica_count > 1 or plan.sequence_parallel:
        raise SpecError("it runs one replica")
    if plan.batch_size > _MOST_TEXTS:
        raise SpecError(f"it serves at most {_MOST_TEXTS} texts at once, not {plan.batch_size}")
    if plan.cache not in ("auto", "bf16") or plan.dtype not in _CACHE:
        raise SpecError(f"it has no cache in {plan.cache if plan.cache != 'auto' else plan.dtype}")
    heads = plan.model.get("num_key_value_heads")
    if isinstance(heads, int) and plan.tensor_parallel > heads:
        raise SpecError(f"it splits heads of keys and values, of which there are {heads}")
    if plan.tensor_parallel > 1 and plan.stages.count > 1:
        raise SpecError("it splits by layer or by tensor, not both")


def _arguments(plan: EnginePlan) -> dict[str, object]:
    stages = plan.stages
    split, mode = [*stages.layers[:-1], stages.layers[-1] + 1], "layer"
    if plan.tensor_parallel > 1:
        split, mode = [1] * plan.tensor_parallel, "tensor"
    on_devices = sum(stages.layers) + 1 if stages.hosted else 999
    arguments: dict[str, object] = {"n-gpu-layers": on_devices}
    if stages.hosts_output:  # both names: the table of embeddings may be the output's too
        arguments["override-tensor"] = "'^(output|token_embd)[.]weight=CPU'"
    if len(split) > 1:
        arguments |= {"split-mode": mode, "tensor-split": ",".join(map(str, split))}
    cache = _CACHE[plan.dtype] if plan.cache == "auto" else plan.cache
    arguments |= {"cache-type-k": cache, "cache-type-v": cache, "parallel": plan.batch_size}
    if plan.tokens:
        arguments["ctx-size"] = plan.tokens * plan.batch_size  # shared by all sequences
    return arguments
