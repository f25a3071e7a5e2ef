"""The models of ``benchmarks.memory``: each architecture small, and with 50 to 330 MB of weights.

In the small ones activations are larger than weights, so that weights do not hide an error.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from fxpart.capture.models.spec import ModelSpec

__all__ = ["MID_SIZE", "SMALL", "lstm", "mlp"]


class Tagger(nn.Module):
    """An embedding, an LSTM, and a classifier for each token."""

    def __init__(self, vocabulary: int, width: int, hidden: int, layers: int) -> None:
        super().__init__()
        self.table = nn.Embedding(vocabulary, width)
        self.lstm = nn.LSTM(width, hidden, layers, batch_first=True, dropout=0.1)
        self.classes = nn.Linear(hidden, 64)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the scores (B, T, 64) of `tokens` (B, T)."""
        states, _ = self.lstm(self.table(tokens))
        scores: Tensor = self.classes(states)
        return scores


def mlp(
    batch_size: int, dtype: torch.dtype, *, widths: Sequence[int]
) -> tuple[nn.Module, tuple[Tensor]]:
    """Return linear layers with ReLU and dropout between, and an input (B, first width)."""
    layers: list[nn.Module] = []
    for wide, narrow in pairwise(widths):
        layers += [nn.Linear(wide, narrow, dtype=dtype), nn.ReLU(), nn.Dropout(0.1)]
    return nn.Sequential(*layers[:-2]), (torch.randn(batch_size, widths[0], dtype=dtype),)


def lstm(
    batch_size: int,
    seq_len: int,
    dtype: torch.dtype,
    *,
    vocabulary: int,
    width: int,
    hidden: int,
    layers: int = 2,
) -> tuple[nn.Module, tuple[Tensor]]:
    """Return a `Tagger` and tokens (B, T)."""
    tokens = torch.randint(vocabulary, (batch_size, seq_len))
    return Tagger(vocabulary, width, hidden, layers).to(dtype), (tokens,)


def _spec(
    name: str,
    architecture: str,
    config: Mapping[str, object],
    batch_size: int,
    seq_len: int | None = None,
) -> ModelSpec:
    return ModelSpec(
        name, architecture=architecture, config=config, batch_size=batch_size, seq_len=seq_len
    )


def _factory_spec(name: str, factory: str, batch_size: int, **factory_args: object) -> ModelSpec:
    seq_len = factory_args.pop("seq_len", None)
    return ModelSpec(
        name,
        factory=factory,
        factory_args=factory_args,
        batch_size=batch_size,
        seq_len=seq_len if isinstance(seq_len, int) else None,
    )


def _gpt2(layers: int, width: int, heads: int, words: int) -> dict[str, object]:
    return {
        "n_layer": layers,
        "n_embd": width,
        "n_head": heads,
        "vocab_size": words,
        "n_positions": 512,
    }


def _layers(layers: int, width: int, heads: int, inner: int, words: int) -> dict[str, object]:
    return {
        "num_hidden_layers": layers,
        "hidden_size": width,
        "num_attention_heads": heads,
        "intermediate_size": inner,
        "vocab_size": words,
    }


def _mixtral(layers: int, width: int, heads: int, inner: int, words: int) -> dict[str, object]:
    experts = {"num_local_experts": 8, "num_experts_per_tok": 2, "num_key_value_heads": heads // 2}
    return {**_layers(layers, width, heads, inner, words), **experts, "sliding_window": None}


def _llama(layers: int, width: int, heads: int, inner: int, words: int) -> dict[str, object]:
    return {**_layers(layers, width, heads, inner, words), "num_key_value_heads": heads // 2}


def _t5(layers: int, width: int, heads: int, inner: int, words: int) -> dict[str, object]:
    return {
        "num_layers": layers,
        "d_model": width,
        "num_heads": heads,
        "d_kv": width // heads,
        "d_ff": inner,
        "vocab_size": words,
    }


def _vit(layers: int, width: int, heads: int, inner: int, image: int) -> dict[str, object]:
    return {
        "num_hidden_layers": layers,
        "hidden_size": width,
        "num_attention_heads": heads,
        "intermediate_size": inner,
        "image_size": image,
        "patch_size": 16,
    }


def _whisper(layers: int, width: int, heads: int, words: int, frames: int) -> dict[str, object]:
    return {
        "d_model": width,
        "encoder_layers": layers,
        "decoder_layers": layers,
        "encoder_attention_heads": heads,
        "decoder_attention_heads": heads,
        "encoder_ffn_dim": 4 * width,
        "decoder_ffn_dim": 4 * width,
        "vocab_size": words,
        "max_source_positions": frames // 2,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "decoder_start_token_id": 1,
    }


_RESNET_SMALL = {"embedding_size": 16, "hidden_sizes": [32, 64, 128, 256], "depths": [1, 2, 2, 1]}
_RESNET_50 = {
    "embedding_size": 64,
    "hidden_sizes": [256, 512, 1024, 2048],
    "depths": [3, 4, 6, 3],
}
_BENCHMARK = "benchmarks.memory_models"
_DLRM = "fxpart.capture.models.dlrm:dlrm"

SMALL = (
    _spec("gpt2", "GPT2LMHeadModel", _gpt2(4, 128, 4, 2000), 4, 64),
    _spec("bert", "BertForMaskedLM", _layers(4, 128, 4, 512, 2000), 4, 64),
    _spec("t5", "T5ForConditionalGeneration", _t5(3, 128, 4, 512, 2000), 4, 64),
    _spec("llama", "LlamaForCausalLM", _llama(4, 128, 4, 344, 2000), 4, 64),
    _spec("mixtral", "MixtralForCausalLM", _mixtral(3, 128, 4, 256, 2000), 4, 64),
    _spec("vit", "ViTForImageClassification", _vit(4, 128, 4, 512, 128), 8),
    _spec("resnet", "ResNetForImageClassification", _RESNET_SMALL, 2),
    _spec("whisper", "WhisperForConditionalGeneration", _whisper(2, 128, 4, 2000, 400), 2, 32),
    _factory_spec(
        "dlrm", _DLRM, 256, embedding_dim=32, max_rows=1000, bottom=[128, 64], top=[256, 128]
    ),
    _factory_spec("mlp", f"{_BENCHMARK}:mlp", 256, widths=[256, 512, 512, 512, 64]),
    _factory_spec(
        "lstm", f"{_BENCHMARK}:lstm", 8, seq_len=32, vocabulary=1000, width=64, hidden=128
    ),
)
"""A few MB of weights, or less."""

MID_SIZE = (
    _spec("gpt2", "GPT2LMHeadModel", _gpt2(4, 768, 12, 50257), 4, 256),
    _spec("bert", "BertForMaskedLM", _layers(8, 512, 8, 2048, 30522), 4, 128),
    _spec("t5", "T5ForConditionalGeneration", _t5(6, 512, 8, 2048, 32128), 4, 128),
    _spec("llama", "LlamaForCausalLM", _llama(8, 512, 8, 1376, 32000), 4, 128),
    _spec("mixtral", "MixtralForCausalLM", _mixtral(4, 512, 8, 1024, 16000), 2, 128),
    _spec("vit", "ViTForImageClassification", _vit(6, 768, 12, 3072, 224), 8),
    _spec("resnet50", "ResNetForImageClassification", _RESNET_50, 4),
    _spec("whisper", "WhisperForConditionalGeneration", _whisper(6, 512, 8, 51865, 1500), 1, 64),
    _factory_spec("dlrm", _DLRM, 2048, embedding_dim=64, max_rows=20_000),
    _factory_spec("mlp", f"{_BENCHMARK}:mlp", 512, widths=[1024, 4096, 4096, 4096, 1024]),
    _factory_spec(
        "lstm", f"{_BENCHMARK}:lstm", 32, seq_len=32, vocabulary=10_000, width=512, hidden=1024
    ),
)
"""Sizes as users run them on one device, with 50 to 330 MB of weights."""
