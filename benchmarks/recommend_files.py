"""Whether the files of a plan say the plan: degrees, layers and batches, read back from the text.

Files of accelerate and DeepSpeed are read by accelerate's own parsers, torchtitan's as TOML, and
the arguments of the others as their command lines have them.
"""

import math
import shlex
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["Asked", "file_faults"]


@dataclass(frozen=True, slots=True)
class Asked:
    """What the files of a plan must come to."""

    devices: int
    """That compute, of all replicas."""
    examples: int
    """Of a step, or of one input of all replicas."""
    model: Mapping[str, Any]
    """The fields of transformers' configuration."""

    @property
    def layers(self) -> int:
        """Of the model."""
        return int(self.model.get("num_hidden_layers") or self.model["n_layer"])

    @property
    def heads(self) -> int:
        """Of queries."""
        return int(self.model.get("num_attention_heads") or self.model["n_head"])


def file_faults(folder: Path, asked: Asked) -> dict[str, list[str]]:
    """Return what is wrong in each file of an engine in `folder`: empty lists where nothing is."""
    return {
        name: check(folder / name, asked)
        for name, check in _CHECKS.items()
        if (folder / name).is_file()
    }


def _differing(**pairs: tuple[object, object]) -> list[str]:
    return [f"{name}: {is_} for {must}" for name, (is_, must) in pairs.items() if is_ != must]


def _torchtitan(path: Path, asked: Asked) -> list[str]:
    document = tomllib.loads(path.read_text())
    parallel, training = document["parallelism"], document["training"]
    replicas = math.prod(
        parallel[f"data_parallel_{kind}_degree"] for kind in ("replicate", "shard")
    )
    tensor, stages = parallel["tensor_parallel_degree"], parallel["pipeline_parallel_degree"]
    context = parallel.get("context_parallel_degree", 1)
    parts = parallel.get("module_fqns_per_model_part", [])
    layers = [name for part in parts for name in part if name.startswith("layers.")]
    local = training["local_batch_size"]
    return _differing(
        devices=(replicas * tensor * stages * context, asked.devices),
        heads=(asked.heads % tensor, 0),
        layers=(layers, [f"layers.{index}" for index in range(asked.layers)] if parts else []),
        parts=(len(parts) % stages if parts else 0, 0),
        batch=(training.get("global_batch_size", local * replicas), asked.examples),
        microbatches=(local % parallel.get("pipeline_parallel_microbatch_size", local), 0),
    )


def _accelerate(path: Path, asked: Asked) -> list[str]:
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser

    given = launch_command_parser().parse_args([f"--config_file={path}", "train.py"])
    read, _, _ = _validate_launch_command(given)
    faults = _differing(devices=(read.num_processes, asked.devices))
    if getattr(read, "use_parallelism_config", False):
        sizes = [getattr(read, f"parallelism_config_{n}_size") for n in ("dp_shard", "tp", "cp")]
        faults += _differing(degrees=(math.prod(map(int, sizes)), asked.devices))
    return faults


def _deepspeed(path: Path, asked: Asked) -> list[str]:
    from accelerate.utils.deepspeed import HfDeepSpeedConfig

    read = HfDeepSpeedConfig(str(path))
    each, steps = (
        int(read.get_value(name))
        for name in ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    )
    whole = read.get_value("train_batch_size")
    return _differing(
        batch=(whole, asked.examples), product=(each * steps * asked.devices, asked.examples)
    )


def _megatron(path: Path, asked: Asked) -> list[str]:
    given = _options(path.read_text().split())
    tensor, stages, context, expert = (
        int(given.get(f"{kind}-parallel-size", "1"))
        for kind in ("tensor-model", "pipeline-model", "context", "expert-model")
    )
    replicas, rest = divmod(asked.devices, tensor * stages * context)
    together = int(given["micro-batch-size"]) * replicas
    chunks = given.get("pipeline-model-parallel-layout", "")
    return _differing(
        devices=(rest, 0),
        heads=(asked.heads % tensor, 0),
        layers=(chunks.count("t") if chunks else asked.layers, asked.layers),
        batch=(int(given["global-batch-size"]), asked.examples),
        microbatches=(int(given["global-batch-size"]) % together, 0),
        experts=(int(given.get("num-experts", expert)) % expert, 0),
    )


def _vllm(path: Path, asked: Asked) -> list[str]:
    words = shlex.split(path.read_text(), comments=True)
    given = _options(words)
    tensor, stages, replicas = (
        int(given.get(f"{kind}-parallel-size", "1")) for kind in ("tensor", "pipeline", "data")
    )
    parts = [word.partition("=")[2] for word in words if word.startswith("VLLM_PP_LAYER")]
    layers = [int(count) for part in parts for count in part.split(",")]
    visible = [word.partition("=")[2] for word in words if word.startswith("CUDA_VISIBLE")]
    return _differing(
        devices=(tensor * stages * replicas, asked.devices),
        visible=(len({*",".join(visible).split(",")}) if visible else asked.devices, asked.devices),
        heads=(asked.heads % tensor, 0),
        stages=(len(layers) if layers else 1, stages),
        layers=(sum(layers) if layers else asked.layers, asked.layers),
        batch=(int(given["max-num-seqs"]) * replicas, asked.examples),
    )


def _llama_cpp(path: Path, asked: Asked) -> list[str]:
    given = _options(shlex.split(path.read_text(), comments=True))
    split = [int(part) for part in given.get("tensor-split", "1").split(",")]
    by_layer = given.get("split-mode", "layer") == "layer" and len(split) > 1
    return _differing(
        devices=(len(split), asked.devices),
        layers=(sum(split) if by_layer else asked.layers + 1, asked.layers + 1),
        batch=(int(given["parallel"]), asked.examples),
    )


def _options(words: list[str]) -> dict[str, str]:
    """Return the options of a command line by name, flags with an empty value."""
    given = {}
    for word, following in zip(words, [*words[1:], ""], strict=True):
        if word.startswith("--"):
            given[word[2:]] = "" if following.startswith("--") else following
    return given


_CHECKS: Mapping[str, Callable[[Path, Asked], list[str]]] = {
    "torchtitan.toml": _torchtitan,
    "accelerate.yaml": _accelerate,
    "deepspeed.json": _deepspeed,
    "megatron_args.txt": _megatron,
    "vllm.sh": _vllm,
    "llama_cpp.sh": _llama_cpp,
}
