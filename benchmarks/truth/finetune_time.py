"""Tokens per second of decoding and full fine-tuning on one GPU, for litgpt and torchtune.

    python -m benchmarks.truth --data FOLDER --set finetune_time

litgpt decodes one sequence in eager mode, 50 tokens after a short prompt. torchtune's rows add one
flag after the other to a full fine-tuning of Llama-3.2-3B on packed sequences: eager, compiled,
chunked loss, recomputed blocks, and updates during the backward, which does not change the work.
Its default optimizer is torch's fused AdamW. Rows with 8-bit optimizer states or activations on the
host are printed and left out. Layers are alike: a step with n takes t2 + (n - 2) / 2 (t4 - t2).
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.truth.finetune_memory import MODELS, PUBLISHERS, language_loss, model_of, name_of
from benchmarks.truth.measured import count_left_out, is_in_host_fit, published
from benchmarks.truth.planned_run import planned_run
from benchmarks.truth.row import Row

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["NAME", "SOURCE", "loss_in_chunks", "rows"]

NAME = "finetune_time"
SOURCE = (
    "Lightning-AI/litgpt tutorials/resource-tables.md@2685705 (Apache-2.0), A100 40 GB;"
    " pytorch/torchtune README.md@bd2a0fc (BSD-3), A100 80 GB"
)
_LAYERS = (2, 4)
_CONTEXT = 8 + 50 // 2
"""Tokens in the cache halfway through the generation."""
_FLAGS: Mapping[str, tuple[str, ...]] = {
    "train-full packed eager": ("runtime=eager",),
    "train-full +compile": ("runtime=compiled",),
    "train-full +chunked cross entropy": (
        "runtime=compiled",
        f"model.loss={__name__}:loss_in_chunks",
    ),
    "train-full +activation checkpointing (block)": ("runtime=compiled", "checkpointing=block"),
    "train-full +optimizer in backward": (
        "runtime=compiled",
        "checkpointing=block",
        "optimizer.implementation=fused",
    ),
}
_CHUNKS = 8
"""Chunks of the logits that torchtune's loss casts to float32, one after the other."""


def loss_in_chunks(result: Any, inputs: Mapping[str, Any]) -> "Tensor":  # noqa: ANN401
    """Return the next-token loss, computed in float32 for one chunk of tokens at a time."""
    from torch.nn.functional import cross_entropy

    scores, tokens = result.logits[:, :-1], inputs["input_ids"][:, 1:]
    pieces = zip(scores.chunk(_CHUNKS, 1), tokens.chunk(_CHUNKS, 1), strict=True)
    losses = [
        cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="sum")
        for logits, targets in pieces
    ]
    total: Tensor = sum(losses[1:], losses[0]) / tokens.numel()
    return total


def rows(data: Path) -> Iterator[Row]:
    """Yield a row for each rate that a run can express.

    Raises:
        FileNotFoundError: if `data` lacks the file.

    """
    left_out: Counter[str] = Counter()
    for point in published(data, *PUBLISHERS):
        if point["metric"] not in ("tokens_per_s", "time_per_1k_iterations"):
            continue
        label = f"{name_of(point)} {point['phase']}"
        if reason := _left_out(point):
            print(f"{label} is left out: {reason}")
            left_out[reason] += 1
            continue
        predicted = _tokens_per_s(point)
        held_out = point["phase"] != "decode" or not is_in_host_fit(label)
        yield Row(label, predicted, point["value"], "tokens/s", held_out=held_out)
    count_left_out(left_out)


def _left_out(point: Mapping[str, Any]) -> str:
    """Return why no run can express a published row, or an empty string if one can."""
    if point["metric"] != "tokens_per_s":
        return "sequences of different lengths, only the longest of which is stated"
    if point["n_devices"] > 1:
        return "several devices, with weights on the host or sizes that contradict each other"
    if name_of(point) not in MODELS:
        return "no configuration of the model"
    is_planned = point["phase"] == "decode" or point["phase"] in _FLAGS
    return "" if is_planned else "paged states, updates in 8 bits, or activations on the host"


def _tokens_per_s(point: Mapping[str, Any]) -> float:
    model, layers = model_of(point)
    if point["phase"] == "decode":
        tokens = 1
        step: tuple[str, ...] = ("phase=decode", f"context_len={_CONTEXT}", "devices=1xa100_40gb")
    else:
        tokens = point["batch"] * point["seq"]
        step = (
            "phase=training",
            "optimizer=adamw",
            f"model.batch_size={point['batch']}",
            f"model.seq_len={point['seq']}",
            f"model.loss={language_loss.__module__}:{language_loss.__name__}",
            "devices=1xa100_80gb",
            *_FLAGS[point["phase"]],
        )

    def latency_s(n_layers: int) -> float:
        deep = f"++model.config.num_hidden_layers={n_layers}"
        run = (*model, *step, deep, "mode=single", "latency=kernels")
        return planned_run(run).evaluation.latency_s

    few_s, more_s = (latency_s(n) for n in _LAYERS)
    few, more = _LAYERS
    return tokens / (few_s + (layers - few) / (more - few) * (more_s - few_s))
