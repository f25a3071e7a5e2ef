"""Peak memory of fine-tuning and decoding on one GPU, as published by litgpt and torchtune.

    python -m benchmarks.truth --data FOLDER --set finetune_memory

A row's fields become the overrides of a run, which predicts the peak of tensors; both libraries
print the same quantity (``max_memory_allocated``). Rows that no run can express are printed with
the reason and counted. No number is fitted to any row. All layers of a model are alike: the peak
with n layers is p2 + (n - 2) / 2 (p4 - p2), where p2 and p4 are the peaks with 2 and 4.

- litgpt's adapters are modelled by peft's, on queries and values, with dropout 0.05 and the rank of
  32 of litgpt's configuration files (config_hub). peft keeps adapters in float32, litgpt in
  bfloat16.
- litgpt computes the loss in bfloat16: `language_loss`.
- torchtune's recipe for a single small device pages optimizer states to the host, updates weights
  during the backward and recomputes blocks: here the states are on the host
  (`offload.optimizer=all`).
- A decode produces 50 tokens after a short prompt, as ``litgpt generate`` does.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.truth.measured import count_left_out, published
from benchmarks.truth.planned_run import planned_run
from benchmarks.truth.row import Row

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["MODELS", "NAME", "PUBLISHERS", "SOURCE", "language_loss", "model_of", "name_of", "rows"]

NAME = "finetune_memory"
SOURCE = (
    "Lightning-AI/litgpt tutorials/resource-tables.md@2685705 and config_hub/finetune"
    " (Apache-2.0), A100 40 GB and A10G; pytorch/torchtune README.md@bd2a0fc (BSD-3)"
)
PUBLISHERS = ("litgpt", "torchtune")
_LAYERS = (2, 4)
_UNITS = {"GB": 1e9, "GiB": 2.0**30}
_PROMPT, _OUTPUT = 8, 50
"""Tokens that litgpt generates."""
_NEOX = {"hidden_size": 4096, "intermediate_size": 16384, "num_attention_heads": 32}
_LLAMA_32 = {"num_key_value_heads": 8, "vocab_size": 128256}
_1B = {"hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 32, "head_dim": 64}
_405B: dict[str, object] = {
    "hidden_size": 16384,
    "intermediate_size": 53248,
    "num_attention_heads": 128,
}
_3B = {"hidden_size": 3072, "intermediate_size": 8192, "num_attention_heads": 24, "head_dim": 128}
MODELS: Mapping[str, tuple[str, int, dict[str, object]]] = {
    "phi-1.5": ("PhiForCausalLM", 24, {"hidden_act": "gelu_pytorch_tanh"}),  # one kernel
    "stablelm-alpha-3b": ("GPTNeoXForCausalLM", 16, {**_NEOX, "vocab_size": 50688}),
    "llama-2-7b": ("llama2_7b", 32, {}),
    "llama-2-13b": ("llama2_13b", 40, {}),
    "llama-3.1-8b": ("llama3_1_8b", 32, {}),
    "llama-3.1-70b": ("llama3_70b", 80, {}),
    "llama-3.1-405b": ("llama3_1_8b", 126, _405B),
    "llama-3.2-1b": ("llama3_1_8b", 16, {**_LLAMA_32, **_1B}),
    "llama-3.2-3b": ("llama3_1_8b", 28, {**_LLAMA_32, **_3B}),
}
"""For each model name: a transformers class or a preset, its layers, and changed settings."""
_LOOKED_UP = ("phi-1.5", "llama-3.2-1b")
"""Models whose rows revealed what litgpt does: GELU in one kernel, a copy of tied weights."""
_TARGETS = {
    "GPTNeoXForCausalLM": "[query_key_value]",  # queries, keys and values in one layer
}
_INEXPRESSIBLE = {
    "dq": "scales in few bits too",
    "offload": "activations or states in the host",
    "8-bit": "states in 8 bits",
    "in backward": "steps inside the backward",
    "compile": "compiled",
    "chunked": "a fused loss",
    "Adapter": "not adapters of LoRA",
    "full fine-tune": "weights, gradients and AdamW's states alone are more than was published",
}
"""The reason why no run can express a row, by a word in the row."""


def language_loss(result: Any, inputs: Mapping[str, Any]) -> "Tensor":  # noqa: ANN401 - transformers'
    """Return the next-token loss, in the dtype of the logits."""
    from torch.nn.functional import cross_entropy

    scores, tokens = result.logits[:, :-1], inputs["input_ids"][:, 1:]
    return cross_entropy(scores.reshape(-1, scores.shape[-1]), tokens.reshape(-1))


def rows(data: Path) -> Iterator[Row]:
    """Yield a row for each peak that a run can express.

    Raises:
        FileNotFoundError: if `data` lacks the file.

    """
    left_out: Counter[str] = Counter()
    for point in published(data, *PUBLISHERS):
        label = (
            f"{name_of(point)} {point['phase']} {point['dtype']} {point['batch']} x {point['seq']}"
        )
        if reason := _left_out(point):
            print(f"{label}, {point['parallel']}, {point['metric']}, is left out: {reason}")
            left_out[reason] += 1
            continue
        predicted = _peak_bytes(*_run(point)) / _UNITS[point["unit"]]
        held_out = name_of(point) not in _LOOKED_UP
        yield Row(label, predicted, point["value"], point["unit"], held_out=held_out)
    count_left_out(left_out)


def name_of(point: Mapping[str, Any]) -> str:
    """Return the model's name in lower case, without the size in brackets."""
    return str(point["model"]).partition(" (")[0].lower()


def _left_out(point: Mapping[str, Any]) -> str:
    """Return why no run can express a published row, or an empty string if one can."""
    # States paged to the host are not in the allocator's peak, whatever their precision.
    how = f"{point['phase']} {point['dtype']} {point.get('note', '')}".replace("paged 8-bit", "")
    if point["metric"] != "peak_memory":
        return "no peak"
    if point["n_devices"] > 1:
        return "several devices: see the set finetune_sharded"
    if name_of(point) not in MODELS:
        return "no configuration of the model"
    for word, reason in _INEXPRESSIBLE.items():
        if word in how:
            return reason
    return "" if any(word in how for word in ("LoRA", "full", "decode")) else "no such step"


def _run(point: Mapping[str, Any]) -> tuple[tuple[str, ...], int]:
    """Return the overrides of a run without the number of layers, and that number."""
    overrides, layers = model_of(point)
    how = f"{point['phase']} {point['dtype']}"
    few_bits = ("weights=nf4", "weights.keep=[]") if "nf4" in how else ()
    model = MODELS[name_of(point)][0]
    step = _step(point, _TARGETS.get(model, "[q_proj,v_proj]"))
    return (*overrides, *few_bits, *step), layers


def model_of(point: Mapping[str, Any]) -> tuple[tuple[str, ...], int]:
    """Return the overrides of a row's model without the number of layers, and that number."""
    model, layers, config = MODELS[name_of(point)]
    preset = (
        ("model=transformers", f"model.architecture={model}", "model.dtype=bfloat16")
        if model.endswith("LM")
        else (f"model={model}",)
    )
    if "torchtune" in point["source"]:  # litgpt copies tied weights: tie_embeddings is unset
        config = {**config, "tie_word_embeddings": "3.2" in point["model"]}
    shape = tuple(f"++model.config.{name}={value}" for name, value in config.items())
    return (*preset, *shape), layers


def _step(point: Mapping[str, Any], targets: str) -> tuple[str, ...]:
    if point["phase"] == "decode":
        return "phase=generate", f"prompt_len={_PROMPT}", f"output_len={_OUTPUT}"
    batch = str(point["batch"]).split()[-1]
    step = (
        "phase=training",
        "optimizer=adamw",
        f"model.batch_size={batch}",
        f"model.seq_len={point['seq']}",
        f"model.loss={__name__}:language_loss",
    )
    if "paged" in point.get("note", ""):
        on_host = "offload.optimizer=all", "offload.activations=none"
        return (*step, "checkpointing=block", "optimizer.implementation=fused", *on_host)
    if "LoRA" not in point["phase"]:
        return (*step, *(("checkpointing=block",) if "checkpointing" in point["phase"] else ()))
    _, _, rank = point["phase"].partition(" r")
    return (
        *step,
        "finetune=lora",
        f"finetune.rank={rank if rank.isdigit() else 32}",
        f"finetune.targets={targets}",
        "finetune.dropout=0.05",
    )


def _planned(overrides: tuple[str, ...], layers: int) -> Any:  # noqa: ANN401 - a Result
    deep = f"++model.config.num_hidden_layers={layers}"
    host = "+host512gb" if "offload.optimizer=all" in overrides else ""
    devices = (f"devices=1x80gb{host}", "mode=single")
    return planned_run((*overrides, deep, *devices))


@cache
def _peak_bytes(overrides: tuple[str, ...], layers: int) -> float:
    """Return the peak of a run with `layers` layers."""
    return _peak_of_layers([_planned(overrides, n).peak_bytes for n in _LAYERS], layers)


def _peak_of_layers(peaks_bytes: list[int], layers: int) -> float:
    few, more = _LAYERS
    return peaks_bytes[0] + (layers - few) / (more - few) * (peaks_bytes[1] - peaks_bytes[0])
