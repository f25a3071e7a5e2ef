"""The runs that ``python -m benchmarks.gpu.measure`` measures and fxpart predicts."""

from dataclasses import dataclass

__all__ = ["CASES", "Case"]


@dataclass(frozen=True, slots=True)
class Case:
    """One model on one GPU, in one phase."""

    label: str
    overrides: tuple[str, ...]
    """Overrides of ``python -m runner``, without devices and mode."""


def _forward(model: str, batch: int, *others: str) -> Case:
    label = " ".join((f"{model} forward, batch {batch}", *(_short(other) for other in others)))
    return Case(label, (f"model={model}", f"model.batch_size={batch}", *others))


def _training(model: str, batch: int, *others: str) -> Case:
    label = " ".join((f"{model} training, batch {batch}", *(_short(other) for other in others)))
    return Case(label, (f"model={model}", f"model.batch_size={batch}", "phase=training", *others))


def _decode(model: str, batch: int, context: int, *others: str) -> Case:
    label = f"{model} decode, batch {batch}, context {context}"
    sizes = (f"model.batch_size={batch}", f"context_len={context}")
    label = " ".join((label, *(_short(other) for other in others)))
    return Case(label, (f"model={model}", "phase=decode", *sizes, *others))


def _short(override: str) -> str:
    """Return the part of an override to show in a label."""
    return override.removeprefix("+").removeprefix("model.").removeprefix("config.")


_AUTOCAST = "model.autocast=bfloat16"
_COMPILED = "runtime=compiled"
_LAYERS = "model.config.num_hidden_layers"

CASES = (
    _forward("resnet50", 1),
    _forward("resnet50", 64),
    _forward("vit_large", 1),
    _forward("vit_large", 64),
    _forward("bert_large", 1),
    _forward("bert_large", 16),
    _forward("bert_large", 16, "model.dtype=bfloat16"),
    _forward("gpt2", 1),
    _forward("gpt2", 8, "model.dtype=bfloat16"),
    _forward("t5_large", 8, "model.dtype=bfloat16"),
    _forward("whisper_small", 8, "model.dtype=bfloat16"),
    _forward("gpt2_xl", 4, "model.dtype=bfloat16"),
    _forward("llama3_1_8b", 1),
    _forward("llama3_1_8b", 4),
    _forward("qwen3_8b", 1),
    _forward("mistral_small", 1),
    _forward("gemma3_27b", 1),
    _decode("llama3_1_8b", 1, 2048),
    _decode("llama3_1_8b", 16, 2048),
    _decode("qwen3_8b", 1, 8192),
    _decode("mistral_small", 4, 4096),
    _decode("gpt2_xl", 1, 1024, "model.dtype=bfloat16"),
    _training("resnet50", 64),
    _training("vit_large", 32),
    _training("vit_large", 32, _AUTOCAST),
    _training("bert_large", 16, _AUTOCAST),
    _training("gpt2", 8),
    _training("gpt2", 8, _AUTOCAST),
    _training("gpt2_xl", 2, _AUTOCAST),
    _training("t5_large", 4, _AUTOCAST),
    _training("whisper_small", 8, _AUTOCAST),
    _training("llama3_1_8b", 2, f"{_LAYERS}=8"),
    _training("llama3_1_8b", 4, f"{_LAYERS}=8", "checkpointing=block"),
    _training("qwen3_8b", 1, f"{_LAYERS}=12"),
    _forward("bert_large", 16, "model.dtype=bfloat16", _COMPILED),
    _forward("llama3_1_8b", 1, _COMPILED),
    _decode("llama3_1_8b", 1, 2048, _COMPILED),
    _training("gpt2", 8, _AUTOCAST, _COMPILED),
    _training("llama3_1_8b", 2, f"{_LAYERS}=8", _COMPILED),
)
