"""Check the engine files of a plan: degrees, layers and batches, read back from the text.

Files of accelerate and DeepSpeed are read by accelerate's own parsers, torchtitan's as TOML, and
the others as command-line arguments.
"""

import math
import shlex
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["Expected", "file_faults"]


@dataclass(frozen=True, slots=True)
class Expected:
    """The values that the files of a plan must have."""

    devices: int
    """Compute devices of all replicas."""
    examples: int
    """Examples of a step, or of one input, over all replicas."""
    model: Mapping[str, Any]
    """The fields of the transformers configuration."""

    @property
    def layers(self) -> int:
        """Number of layers."""
        return int(self.model.get("num_hidden_layers") or self.model["n_layer"])

    @property
    def heads(self) -> int:
        """Number of query heads."""
        return int(self.model.get("num_attention_heads") or self.model["n_head"])


def file_faults(folder: Path, expected: Expected) -> dict[str, list[str]]:
    """Return the faults of each engine file in `folder`, an empty list where there are none."""
    return {
        name: check(folder / name, expected)
        for name, check in _CHECKS.items()
        if (folder / name).is_file()
    }


def _differences(**pairs: tuple[object, object]) -> list[str]:
    return [
        f"{name}: {actual} for {wanted}"
        for name, (actual, wanted) in pairs.items()
        if actual != wanted
    ]


def _torchtitan(path: Path, expected: Expected) -> list[str]:
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
    return _differences(
        devices=(replicas * tensor * stages * context, expected.devices),
        heads=(expected.heads % tensor, 0),
        layers=(layers, [f"layers.{index}" for index in range(expected.layers)] if parts else []),
        parts=(len(parts) % stages if parts else 0, 0),
        batch=(training.get("global_batch_size", local * replicas), expected.examples),
        microbatches=(local % parallel.get("pipeline_parallel_microbatch_size", local), 0),
    )


def _accelerate(path: Path, expected: Expected) -> list[str]:
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser

    arguments = launch_command_parser().parse_args([f"--config_file={path}", "train.py"])
    options, _, _ = _validate_launch_command(arguments)
    faults = _differences(devices=(options.num_processes, expected.devices))
    if getattr(options, "use_parallelism_config", False):
        sizes = [getattr(options, f"parallelism_config_{n}_size") for n in ("dp_shard", "tp", "cp")]
        faults += _differences(degrees=(math.prod(map(int, sizes)), expected.devices))
    return faults


def _deepspeed(path: Path, expected: Expected) -> list[str]:
    from accelerate.utils.deepspeed import HfDeepSpeedConfig

    config = HfDeepSpeedConfig(str(path))
    micro_batch, steps = (
        int(config.get_value(name))
        for name in ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    )
    batch = config.get_value("train_batch_size")
    return _differences(
        batch=(batch, expected.examples),
        product=(micro_batch * steps * expected.devices, expected.examples),
    )


def _megatron(path: Path, expected: Expected) -> list[str]:
    options = _options(path.read_text().split())
    tensor, stages, context, expert = (
        int(options.get(f"{kind}-parallel-size", "1"))
        for kind in ("tensor-model", "pipeline-model", "context", "expert-model")
    )
    replicas, remainder = divmod(expected.devices, tensor * stages * context)
    step_examples = int(options["micro-batch-size"]) * replicas
    chunks = options.get("pipeline-model-parallel-layout", "")
    return _differences(
        devices=(remainder, 0),
        heads=(expected.heads % tensor, 0),
        layers=(chunks.count("t") if chunks else expected.layers, expected.layers),
        batch=(int(options["global-batch-size"]), expected.examples),
        microbatches=(int(options["global-batch-size"]) % step_examples, 0),
        experts=(int(options.get("num-experts", expert)) % expert, 0),
    )


def _vllm(path: Path, expected: Expected) -> list[str]:
    words = shlex.split(path.read_text(), comments=True)
    options = _options(words)
    tensor, stages, replicas = (
        int(options.get(f"{kind}-parallel-size", "1")) for kind in ("tensor", "pipeline", "data")
    )
    parts = [word.partition("=")[2] for word in words if word.startswith("VLLM_PP_LAYER")]
    layers = [int(count) for part in parts for count in part.split(",")]
    visible = [word.partition("=")[2] for word in words if word.startswith("CUDA_VISIBLE")]
    return _differences(
        devices=(tensor * stages * replicas, expected.devices),
        visible=(
            len({*",".join(visible).split(",")}) if visible else expected.devices,
            expected.devices,
        ),
        heads=(expected.heads % tensor, 0),
        stages=(len(layers) if layers else 1, stages),
        layers=(sum(layers) if layers else expected.layers, expected.layers),
        batch=(int(options["max-num-seqs"]) * replicas, expected.examples),
    )


def _llama_cpp(path: Path, expected: Expected) -> list[str]:
    options = _options(shlex.split(path.read_text(), comments=True))
    split = [int(part) for part in options.get("tensor-split", "1").split(",")]
    by_layer = options.get("split-mode", "layer") == "layer" and len(split) > 1
    return _differences(
        devices=(len(split), expected.devices),
        layers=(sum(split) if by_layer else expected.layers + 1, expected.layers + 1),
        batch=(int(options["parallel"]), expected.examples),
    )


def _options(words: list[str]) -> dict[str, str]:
    """Return the options of a command line by name, flags with an empty value."""
    options = {}
    for word, following in zip(words, [*words[1:], ""], strict=True):
        if word.startswith("--"):
            options[word[2:]] = "" if following.startswith("--") else following
    return options


_CHECKS: Mapping[str, Callable[[Path, Expected], list[str]]] = {
    "torchtitan.toml": _torchtitan,
    "accelerate.yaml": _accelerate,
    "deepspeed.json": _deepspeed,
    "megatron_args.txt": _megatron,
    "vllm.sh": _vllm,
    "llama_cpp.sh": _llama_cpp,
}
