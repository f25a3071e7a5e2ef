"""Small versions of published architectures, for captures that are then executed."""

from fxpart.capture.models.spec import ModelSpec

GPT2 = ModelSpec(
    "gpt2",
    architecture="GPT2LMHeadModel",
    config={"n_layer": 2, "n_embd": 64, "n_head": 4, "vocab_size": 101, "n_positions": 64},
    batch_size=2,
    seq_len=32,
)
LLAMA = ModelSpec(
    "llama",
    architecture="LlamaForCausalLM",
    config={
        "vocab_size": 101,
        "hidden_size": 64,
        "intermediate_size": 160,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
    batch_size=2,
    seq_len=32,
)
RESNET = ModelSpec(
    "resnet",
    architecture="ResNetForImageClassification",
    config={"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 2], "num_labels": 5},
    batch_size=2,
)
BERT = ModelSpec(
    "bert",
    architecture="BertForMaskedLM",
    config={
        "vocab_size": 101,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 64,
    },
    batch_size=2,
    seq_len=16,
)
