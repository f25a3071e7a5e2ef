"""The subject of a run in one line, which heads its output and its figures."""

import re

import numpy as np

from fxpart.capture.models.spec import DEFAULT_SEQ_LEN
from fxpart.core.graph import ENCODER_STATES, OpGraph
from fxpart.cost.storage_kinds import short_name
from runner.config.schema import Config
from runner.experiment.float8 import multiplies_in_float8
from runner.experiment.mesh import replica_count
from runner.experiment.serving import absorbs, generates
from runner.experiment.weight_format import format_text
from runner.output.terminal import counted

__all__ = ["count_parameters", "subject_line"]

_BITS = re.compile(r"\d+")
_TOKENS, _TOKEN_BYTES = "input_ids", 8
"""The input of a transformers model with a number (int64) for each token."""
_STEPS = (("T", 10**12), ("B", 10**9), ("M", 10**6), ("k", 10**3))


def subject_line(config: Config, graph: OpGraph, *, reads_text: bool = True) -> str:
    """Return model, parameters, dtype, batch x sequence, phase, mode, devices and link as text.

    Parameters and dtype are those of `graph`, the model's, not those in the config. `reads_text`
    says whether the prompts of a generation are tokens.
    """
    model = config.model
    against_cache = config.phase.name == "decode" and _context_len(config, graph) is not None
    length = None if against_cache or generates(config) else _sequence_len(config, graph)
    parameters, dtype = count_parameters(graph, model.dtype if model.autocast else "")
    parts = [
        model.name,
        f"{_short(parameters)} parameters"
        + (" of the decoder" if _is_of_decoder(graph) else "")
        + _share(config),
        _weights(config, graph, dtype or model.dtype)
        + (f" under {model.autocast} autocast" if model.autocast else ""),
        f"batch {model.batch_size}" + (f" x {length}" if length else ""),
        _phase(config, graph, reads_text=reads_text),
        f"kv_cache={config.kv_cache}" if config.kv_cache != "auto" else "",
        "latent_attention=absorbed" if absorbs(config) else "",
        f"runtime={config.runtime.name}" if config.runtime.name != "eager" else "",
        "runtime.regional=true" if config.runtime.regional else "",
        "runtime.compiled_loss=true" if config.runtime.compiled_loss else "",
        _mode(config),
        config.devices.spec,
        config.transfer_rate.name
        + (f" and {far.name}" if (far := config.devices.between_nodes) is not None else ""),
    ]
    if config.tensor_parallel > 1:
        parts.append(f"tensor_parallel={config.tensor_parallel}")
    if config.sequence_parallel:
        parts.append("sequence_parallel=true")
    if config.loss_parallel:
        parts.append("loss_parallel=true")
    degrees = ("expert_parallel", "context_parallel")
    parts += [f"{name}={getattr(config, name)}" for name in degrees if getattr(config, name) > 1]
    if config.expert_imbalance != 1:
        parts.append(f"expert_imbalance={config.expert_imbalance:g}")
    if config.engine != "torch":
        parts.append(f"engine={config.engine}")
    replicas = replica_count(config)
    if replicas > 1:
        sharded = f", zero={config.zero}" if config.zero else ""
        sharded += f", reduce_dtype={config.reduce_dtype}" if config.reduce_dtype else ""
        parts.append(f"{replicas} replicas{sharded}")
    return ", ".join(part for part in parts if part)


def _share(config: Config) -> str:
    """Return what has the counted parameters, if that is not the whole model."""
    if config.tensor_parallel > 1 and config.mode.name != "single":
        return " a tensor-parallel rank"  # which has a device in each stage
    return " a device" if config.tensor_parallel > 1 or config.expert_parallel > 1 else ""


def _weights(config: Config, graph: OpGraph, dtype: str) -> str:
    if config.weights.name == "none":
        return dtype
    return f"{dtype} with weights in {format_text(config, graph)}"


def _sequence_len(config: Config, graph: OpGraph) -> int | None:
    """Return the tokens of each example: as stated, or of the model's default; None if unknown."""
    stated = config.model.seq_len
    if stated is not None or config.phase.name == "decode" or _TOKENS not in graph.value_names:
        return stated
    token_bytes = int(graph.value_bytes[graph.value_names.index(_TOKENS)])
    # The graph is that of one replica.
    tokens = token_bytes * replica_count(config) // (config.model.batch_size * _TOKEN_BYTES)
    # Above the default, an example has several rows of tokens, such as the choices of an answer.
    return tokens if tokens <= DEFAULT_SEQ_LEN else None


def _is_of_decoder(graph: OpGraph) -> bool:
    """Return whether this is a decode of a model with an encoder, which does not run in it."""
    return ENCODER_STATES in graph.value_names


def _context_len(config: Config, graph: OpGraph) -> int | None:
    """Return the length of the cache, which is the prompt's if it is not stated; None if unknown.

    The length of an encoder's input is not that of the decoder's cache.
    """
    stated = config.context_len
    return config.model.seq_len if stated is None and not _is_of_decoder(graph) else stated


def _phase(config: Config, graph: OpGraph, *, reads_text: bool) -> str:
    if config.phase.name != "training":
        if generates(config):
            prompts = f"prompts of {config.prompt_len}" if reads_text else "the encoder's input"
            return f"{config.output_len} tokens after {prompts}"
        decodes = config.phase.name == "decode"
        context_len = _context_len(config, graph) if decodes else config.context_len
        context = f" against {context_len} tokens" if context_len else ""
        return f"{config.phase.name}{context}"
    tuned = "" if config.finetune.name == "none" else f" of {config.finetune.name} adapters"
    products = f" in {config.float8.name} float8" if multiplies_in_float8(config) else ""
    updates = "" if config.optimizer.name == "none" else f" with {config.optimizer.name}"
    recomputation = (
        "" if config.checkpointing == "none" else f", checkpointing={config.checkpointing}"
    )
    if config.recomputed_blocks:
        recomputation += f" of {counted(len(config.recomputed_blocks), 'block')}"
    loss = " of the mean of outputs" if is_mean_of_outputs(graph) else ""
    return f"{config.phase.name}{tuned}{products}{loss}{updates}{recomputation}"


def is_mean_of_outputs(graph: OpGraph) -> bool:
    """Return whether the loss of a training step is a mean computed outside the model's modules.

    It stands in for the loss of a model without labels.
    """
    last = graph.first_backward - 1
    return graph.modules[last] == "" and short_name(graph.targets[last]) == "mean"


def _mode(config: Config) -> str:
    if config.schedule.name == "none":
        return config.mode.name
    count = counted(config.microbatches, "microbatch", "microbatches")
    return f"{config.mode.name} ({config.schedule.name}, {count})"


def count_parameters(graph: OpGraph, dtype: str = "") -> tuple[int, str]:
    """Return the number of elements in the weights of `graph`, and the dtype of most of the bytes.

    Buffers count, and tied weights count once. The dtype of a weight is that of its first user, or
    `dtype` if given: under autocast the first user is a cast. Without weights it is empty.
    """
    first_user = np.full(len(graph.weight_bytes), -1, dtype=np.int64)
    first_user[graph.uses[::-1]] = graph.users[::-1]
    bytes_of: dict[str, int] = {}
    for op, size in zip(first_user.tolist(), graph.weight_bytes.tolist(), strict=True):
        if op >= 0:
            weight_dtype = dtype or graph.dtypes[op]
            bytes_of[weight_dtype] = bytes_of.get(weight_dtype, 0) + size
    elements = sum(size // _itemsize(dtype) for dtype, size in bytes_of.items())
    return elements, max(bytes_of, key=lambda dtype: bytes_of[dtype], default="")


def _itemsize(dtype: str) -> int:
    """Return the bytes per element, from the bits in a dtype's name; 1 for ``bool``."""
    bits = _BITS.search(dtype)
    return max(int(bits[0]) // 8, 1) if bits else 1


def _short(count: int) -> str:
    for letter, step in _STEPS:
        if count >= step:
            return f"{count / step:#.3g}".rstrip(".") + letter
    return str(count)
