"""A small version of every preset: its architecture and settings, few layers, small widths."""

from fxpart.capture.models.spec import ModelSpec

_LLAMA = {
    "vocab_size": 101,
    "hidden_size": 32,
    "intermediate_size": 72,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "hidden_act": "silu",
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
_GPT2 = {
    "vocab_size": 101,
    "n_positions": 32,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "activation_function": "gelu_new",
    "layer_norm_epsilon": 1e-5,
}


def _text(name: str, architecture: str, config: dict[str, object]) -> ModelSpec:
    return ModelSpec(name, architecture=architecture, config=config, batch_size=2, seq_len=12)


def _images(name: str, architecture: str, config: dict[str, object]) -> ModelSpec:
    return ModelSpec(name, architecture=architecture, config=config, batch_size=2)


_ALL = (
    _text("llama2_7b", "LlamaForCausalLM", _LLAMA),
    _text("llama2_13b", "LlamaForCausalLM", {**_LLAMA, "hidden_size": 40}),
    _text(
        "llama3_70b",
        "LlamaForCausalLM",
        {**_LLAMA, "num_key_value_heads": 2, "rope_theta": 500000.0},
    ),
    _text(
        "mixtral_8x7b",
        "MixtralForCausalLM",
        {
            **_LLAMA,
            "num_key_value_heads": 2,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "rope_theta": 1000000.0,
            "sliding_window": None,
        },
    ),
    _text("gpt2", "GPT2LMHeadModel", _GPT2),
    _text("gpt2_xl", "GPT2LMHeadModel", {**_GPT2, "n_embd": 40, "n_head": 5}),
    _text(
        "bert_large",
        "BertForMaskedLM",
        {
            "vocab_size": 101,
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "intermediate_size": 64,
            "hidden_act": "gelu",
            "max_position_embeddings": 32,
            "type_vocab_size": 2,
            "layer_norm_eps": 1e-12,
            "pad_token_id": 0,
        },
    ),
    _text(
        "t5_large",
        "T5ForConditionalGeneration",
        {
            "vocab_size": 101,
            "d_model": 32,
            "d_kv": 8,
            "d_ff": 64,
            "num_layers": 2,
            "num_heads": 4,
            "relative_attention_num_buckets": 8,
            "feed_forward_proj": "relu",
            "layer_norm_epsilon": 1e-6,
        },
    ),
    _images(
        "vit_large",
        "ViTForImageClassification",
        {
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "intermediate_size": 64,
            "hidden_act": "gelu",
            "layer_norm_eps": 1e-12,
            "image_size": 32,
            "patch_size": 8,
            "num_channels": 3,
            "num_labels": 10,
        },
    ),
    _images(
        "resnet50",
        "ResNetForImageClassification",
        {
            "num_channels": 3,
            "embedding_size": 4,
            "hidden_sizes": [8, 8, 16, 16],
            "depths": [1, 1, 1, 1],
            "layer_type": "bottleneck",
            "hidden_act": "relu",
            "downsample_in_first_stage": False,
            "num_labels": 10,
        },
    ),
    _text(
        "whisper_small",
        "WhisperForConditionalGeneration",
        {
            "vocab_size": 101,
            "num_mel_bins": 8,
            "d_model": 32,
            "encoder_layers": 2,
            "encoder_attention_heads": 4,
            "encoder_ffn_dim": 64,
            "decoder_layers": 2,
            "decoder_attention_heads": 4,
            "decoder_ffn_dim": 64,
            "activation_function": "gelu",
            "max_source_positions": 16,
            "max_target_positions": 16,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "decoder_start_token_id": 1,
        },
    ),
    ModelSpec(
        "dlrm",
        factory="fxpart.capture.models.dlrm:dlrm",
        factory_args={
            "embedding_dim": 8,
            "rows": [40, 39, 3, 40, 10, 40],
            "pooling": 2,
            "bottom": [16, 12],
            "top": [32, 16],
        },
        batch_size=4,
    ),
)
SMALL_PRESETS = {spec.name: spec for spec in _ALL}
"""By the name of the preset in ``conf/model``."""
_LIKE_OTHERS = ("llama2_7b", "llama2_13b", "gpt2_xl")
DISTINCT = tuple(name for name in SMALL_PRESETS if name not in _LIKE_OTHERS)
"""Without those that differ from another preset only in width, or in sharing no heads."""
