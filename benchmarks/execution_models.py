"""The models of ``benchmarks.execution``: mid-size versions of published architectures."""

from collections.abc import Mapping

from fxpart.capture.models.spec import ModelSpec

__all__ = ["MODELS"]

_GPT2 = {"n_layer": 6, "n_embd": 512, "n_head": 8, "vocab_size": 16000, "n_positions": 256}
_LLAMA = {
    "vocab_size": 16000,
    "hidden_size": 512,
    "intermediate_size": 1376,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}
_BERT = {
    "vocab_size": 16000,
    "hidden_size": 512,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "intermediate_size": 2048,
}
_T5 = {"vocab_size": 16000, "d_model": 384, "d_kv": 64, "d_ff": 1024, "num_layers": 4}
_VIT = {
    "hidden_size": 384,
    "num_hidden_layers": 6,
    "num_attention_heads": 6,
    "intermediate_size": 1536,
}
_RESNET = {"embedding_size": 64, "hidden_sizes": [256, 512, 1024, 2048], "depths": [3, 4, 6, 3]}
_WHISPER = {
    "d_model": 256,
    "encoder_layers": 3,
    "decoder_layers": 3,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 1024,
    "decoder_ffn_dim": 1024,
    "vocab_size": 16000,
    "pad_token_id": 0,
    "max_source_positions": 500,
}
_OPT = {
    "vocab_size": 16000,
    "hidden_size": 512,
    "word_embed_proj_dim": 512,
    "num_hidden_layers": 6,
    "ffn_dim": 2048,
    "num_attention_heads": 8,
    "max_position_embeddings": 256,
}
_CONVNEXT = {"hidden_sizes": [64, 128, 256, 512], "depths": [2, 2, 6, 2]}


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


MODELS = (
    _spec("gpt2", "GPT2LMHeadModel", _GPT2, batch_size=4, seq_len=128),
    _spec("llama", "LlamaForCausalLM", _LLAMA, batch_size=2, seq_len=256),
    _spec("bert", "BertForMaskedLM", _BERT, batch_size=4, seq_len=128),
    _spec("t5", "T5ForConditionalGeneration", _T5, batch_size=4, seq_len=128),
    _spec("vit", "ViTForImageClassification", _VIT, batch_size=4),
    _spec("resnet50", "ResNetForImageClassification", _RESNET, batch_size=2),
    _spec("whisper", "WhisperForConditionalGeneration", _WHISPER, batch_size=1, seq_len=64),
    _spec("opt", "OPTForCausalLM", _OPT, batch_size=4, seq_len=128),
    _spec("convnext", "ConvNextForImageClassification", _CONVNEXT, batch_size=4),
    ModelSpec(
        "dlrm",
        factory="fxpart.capture.models.dlrm:dlrm",
        factory_args={"embedding_dim": 64, "max_rows": 20_000},
        batch_size=512,
    ),
)
"""The models that are split and run in one process."""
