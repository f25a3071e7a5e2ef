"""Peak memory of fine-tuning with FSDP on several GPUs, as published by litgpt and torchtune.

    python -m benchmarks.truth --data FOLDER --set finetune_sharded

The rows of `finetune_memory` that have several devices, and torchtune's LoRA on Llama-3.1-70B from
the same table: `zero=3` over replicas of one device. No number is fitted to any row. litgpt's FSDP
is version 1, modelled by FSDP2. torchtune recomputes blocks, has adapters of rank 16 on all
products but those of keys, and computes the loss in eight chunks; its nf4 has scales of 8 bits in
blocks of 256 scales (torchao).

Some figures contradict others of their source and are printed with our prediction, but not counted:

- torchtune's README states 2 sequences of 2,048 tokens for all rows, but its recipes
  (recipes/configs/llama3_1/70B_lora.yaml, 405B_qlora.yaml) have batches of 2 and 1 and sequences of
  the Alpaca data set, and the README says "measured over one full training epoch". Weights, block
  inputs and one block of 2 x 2,048 tokens alone need more than was published. The rows have the
  recipes' batches, and 1,304 tokens, the longest sample by litgpt's tables.
- litgpt's LoRA on one GPU shows what sequences add to the weights: 15.6 GB for two of Llama-2-7B,
  12 GB for one of the 13B. Four of the 7B on each of two devices, and one of the 13B on each of
  four, cannot have the peaks that are published for them.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.truth.finetune_memory import PUBLISHERS, SOURCE, model_of, name_of
from benchmarks.truth.measured import count_left_out, published
from benchmarks.truth.planned_run import planned_run
from benchmarks.truth.row import Row
from fxpart.cost.holding import holding

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["NAME", "SOURCE", "chunked_loss", "rows"]

NAME = "finetune_sharded"
_LAYERS, _DEPTH = (2, 4), "++model.config.num_hidden_layers"
_SECOND_GATHER = "all_gather.model.layers.1"
_CHUNKS = 8
_UNITS = {"GB": 1e9, "GiB": 2.0**30}
_TORCHTUNE = "github:pytorch/torchtune README.md@bd2a0fc"
_LORA_70B: Mapping[str, Any] = {
    "source": _TORCHTUNE,
    "model": "Llama-3.1-70B",
    "n_devices": 8,
    "batch": 2,
    "seq": 2048,
    "phase": "train-LoRA r16",
    "dtype": "bf16",
    "metric": "peak_memory",
    "value": 27.6,
    "unit": "GiB",
}
"""A row of torchtune's table that `measured.json` lacks."""
_RECIPE_BATCHES = {"llama-3.1-70b": 2, "llama-3.1-405b": 1}
_LONGEST_SAMPLE = 1304
_CONTRADICTED = (("llama-2-7b", "micro 4"), ("llama-2-13b", "micro 1"))
_TORCHTUNE_STEP = (
    "finetune.rank=16",
    "finetune.autocast_adapter_dtype=false",
    "finetune.targets=[q_proj,v_proj,o_proj,gate_proj,up_proj,down_proj]",
    "checkpointing=block",
    "optimizer.implementation=fused",
    f"model.loss={__name__}:chunked_loss",
)
_LITGPT_STEP = (
    "finetune.rank=8",
    "finetune.autocast_adapter_dtype=false",
    "finetune.targets=[q_proj,v_proj]",
    "finetune.dropout=0.05",
    "model.loss=benchmarks.truth.finetune_memory:language_loss",
)
_NF4 = ("weights=nf4", f"weights.group_bytes={1 + 4 / 256}")


def chunked_loss(result: Any, inputs: Mapping[str, Any]) -> "Tensor":  # noqa: ANN401 - transformers'
    """Return the next-token loss, computed in float32 for one chunk of positions at a time."""
    import torch
    from torch.nn.functional import cross_entropy

    scores, tokens = result.logits[:, :-1], inputs["input_ids"][:, 1:]
    parts = zip(scores.chunk(_CHUNKS, 1), tokens.chunk(_CHUNKS, 1), strict=True)
    sums = [
        cross_entropy(part.flatten(0, 1).float(), wanted.flatten(), reduction="sum")
        for part, wanted in parts
    ]
    loss: Tensor = torch.stack(sums).sum() / tokens.numel()
    return loss


def rows(data: Path) -> Iterator[Row]:
    """Yield a row for each published peak on several devices, except with states on the host.

    Raises:
        FileNotFoundError: if `data` lacks the file.

    """
    left_out: Counter[str] = Counter()
    for point in [*published(data, *PUBLISHERS), _LORA_70B]:
        if point["n_devices"] == 1 or point["metric"] != "peak_memory":
            continue
        if "offload" in point["phase"]:
            left_out["weights, gradients and states on the host"] += 1
            continue
        row = _row(point)
        recipe = _RECIPE_BATCHES.get(name_of(point))
        if recipe or (name_of(point), point["batch"]) in _CONTRADICTED:
            print(
                f"{row.label} is left out: {row.predicted:.1f} predicted, {row.measured} published"
            )
            left_out["contradicted by its own source"] += 1
        else:
            yield row
        if recipe:
            yield _row({**point, "batch": recipe, "seq": _LONGEST_SAMPLE})
    count_left_out(left_out)


def _row(point: Mapping[str, Any]) -> Row:
    label = f"{name_of(point)} {point['phase']}, {point['batch']} x {point['seq']}"
    label += f" on each of {point['n_devices']}"
    predicted = _peak_bytes(point) / _UNITS[point["unit"]]
    return Row(label, predicted, point["value"], point["unit"], held_out=True)


def _peak_bytes(point: Mapping[str, Any]) -> float:
    """Return the peak of all layers, which are alike, from those of two depths."""
    model, layers = model_of(point)
    count = point["n_devices"]
    batch_size = int(str(point["batch"]).split()[-1]) * count
    overrides = (
        *model,
        f"model.batch_size={batch_size}",
        f"model.seq_len={point['seq']}",
        *("phase=training", "finetune=lora", "optimizer=adamw", "mode=single", "zero=3"),
        *(f"data_parallel={count}", f"devices={count}x80gb", "transfer_rate=nvlink3"),
        *(_TORCHTUNE_STEP if "torchtune" in point["source"] else _LITGPT_STEP),
        *(_NF4 if "nf4" in point["phase"] else ()),
    )
    few, more = _LAYERS
    # One part of the step may have the peak of few layers, another that of all.
    few_peaks, more_peaks = (_peaks_of_parts((*overrides, f"{_DEPTH}={n}")) for n in _LAYERS)
    depth = (layers - few) / (more - few)
    return max(
        few_bytes + depth * (more_bytes - few_bytes)
        for few_bytes, more_bytes in zip(few_peaks, more_peaks, strict=True)
    )


def _peaks_of_parts(overrides: tuple[str, ...]) -> list[int]:
    """Return the peaks before the second gather, in the rest of the forward, and in the backward.

    Raises:
        FxpartError: if the run cannot be planned.

    """
    result = planned_run(overrides)
    graph = result.problem.graph
    held = holding(result.problem.memory, result.assignment, 1)
    curve_bytes = held.weight_bytes[0] + held.first_live_bytes[0]
    bounds = (0, graph.names.index(_SECOND_GATHER), graph.first_backward, graph.n_ops)
    return [int(curve_bytes[begin:end].max()) for begin, end in pairwise(bounds)]
