"""Models of transformers by name: suitable inputs, and one line for every mistake."""

from typing import Any

import pytest
import torch

from fxpart.capture.api import capture_graph
from fxpart.capture.inference.export import export_program
from fxpart.capture.models.build import BuiltModel, build_model
from fxpart.capture.models.spec import ModelSpec
from fxpart.errors import SpecError

SMALL = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
EXPERTS = {**SMALL, "num_experts_per_tok": 2}


def build(architecture: str, **fields: Any) -> BuiltModel:  # noqa: ANN401
    return build_model(ModelSpec("m", architecture, **fields))


def shapes(model: BuiltModel) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    assert model.args == ()
    return {name: (tuple(value.shape), value.dtype) for name, value in model.kwargs.items()}


@pytest.mark.parametrize(
    ("architecture", "config", "seq_len", "expected"),
    [
        ("LlamaForCausalLM", SMALL, 9, {"input_ids": (3, 9)}),
        ("LlamaForCausalLM", SMALL, None, {"input_ids": (3, 512)}),
        (
            "LlamaForCausalLM",
            {**SMALL, "max_position_embeddings": 64},
            None,
            {"input_ids": (3, 64)},
        ),
        # A rotary encoding has no table of limited length.
        ("LlamaForCausalLM", {**SMALL, "max_position_embeddings": 64}, 65, {"input_ids": (3, 65)}),
        ("GPT2Model", {"n_layer": 1, "n_positions": 16}, None, {"input_ids": (3, 16)}),
        # RoBERTa reserves 2 of its 514 rows for the padding, OPT adds 2 to those it states.
        (
            "RobertaModel",
            {"num_hidden_layers": 1, "max_position_embeddings": 514},
            512,
            {"input_ids": (3, 512)},
        ),
        ("OPTModel", {"num_hidden_layers": 1}, 2048, {"input_ids": (3, 2048)}),
        ("T5Model", {"num_layers": 1}, 7, {"input_ids": (3, 7), "decoder_input_ids": (3, 7)}),
        ("T5EncoderModel", {"num_layers": 1}, 7, {"input_ids": (3, 7)}),
        ("XLNetModel", {"n_layer": 1}, None, {"input_ids": (3, 512)}),
        (
            "ViTModel",
            {"num_hidden_layers": 1, "image_size": 32},
            None,
            {"pixel_values": (3, 3, 32, 32)},
        ),
        (
            "ViTModel",
            {"num_hidden_layers": 1, "image_size": [32, 48], "num_channels": 1},
            None,
            {"pixel_values": (3, 1, 32, 48)},
        ),
        ("ResNetModel", {"depths": [1, 1, 1, 1]}, None, {"pixel_values": (3, 3, 224, 224)}),
        (
            "WhisperForConditionalGeneration",
            {
                "encoder_layers": 1,
                "decoder_layers": 1,
                "num_mel_bins": 40,
                "max_source_positions": 100,
            },
            None,
            {"input_features": (3, 40, 200), "decoder_input_ids": (3, 448)},
        ),
        (
            "WhisperForAudioClassification",
            {"encoder_layers": 1},
            None,
            {"input_features": (3, 80, 3000)},
        ),
        ("Wav2Vec2Model", {"num_hidden_layers": 1}, 16000, {"input_values": (3, 16000)}),
        ("Wav2Vec2Model", {"num_hidden_layers": 1}, None, {"input_values": (3, 160_000)}),
        (
            "ASTModel",
            {"num_hidden_layers": 1, "max_length": 64},
            None,
            {"input_values": (3, 64, 128)},
        ),
        ("EncodecModel", {}, 24000, {"input_values": (3, 1, 24000)}),
        (
            "Speech2TextModel",
            {"encoder_layers": 1, "decoder_layers": 1},
            20,
            {"input_features": (3, 1024, 80), "decoder_input_ids": (3, 20)},
        ),
        (
            "CLIPModel",
            {
                "text_config": {"num_hidden_layers": 1, "max_position_embeddings": 20},
                "vision_config": {"num_hidden_layers": 1, "image_size": 64},
            },
            None,
            {"input_ids": (3, 20), "pixel_values": (3, 3, 64, 64)},
        ),
        (
            "TimesformerModel",
            {"num_hidden_layers": 1, "num_frames": 2, "image_size": 32},
            None,
            {"pixel_values": (3, 2, 3, 32, 32)},
        ),
        (
            "PatchTSTModel",
            {"num_hidden_layers": 1, "context_length": 64, "num_input_channels": 5},
            None,
            {"past_values": (3, 64, 5)},
        ),
        ("BertForMultipleChoice", {"num_hidden_layers": 1}, 7, {"input_ids": (3, 2, 7)}),
        ("DistilBertModel", {"n_layers": 1}, 7, {"input_ids": (3, 7)}),
        ("SuperGlueForKeypointMatching", {}, None, {"pixel_values": (3, 2, 3, 224, 224)}),
        (
            "LxmertModel",
            {"l_layers": 1, "x_layers": 1, "r_layers": 1},
            7,
            {"input_ids": (3, 7), "visual_feats": (3, 36, 2048), "visual_pos": (3, 36, 4)},
        ),
    ],
)
def test_inputs_fit_the_model(
    architecture: str, config: dict[str, Any], seq_len: int | None, expected: dict[str, Any]
) -> None:
    model = build(architecture, config=config, seq_len=seq_len, batch_size=3, dtype="bfloat16")
    ids = ("input_ids", "decoder_input_ids")
    kinds = {n: torch.int64 if n in ids else torch.bfloat16 for n in expected}
    assert shapes(model) == {name: (shape, kinds[name]) for name, shape in expected.items()}


@pytest.mark.parametrize(
    ("architecture", "config", "seq_len", "most", "what"),
    [
        ("GPT2LMHeadModel", {"n_layer": 1}, 1025, 1024, "input_ids"),
        ("BertForMaskedLM", {"num_hidden_layers": 1}, 513, 512, "input_ids"),
        (
            "RobertaModel",
            {"num_hidden_layers": 1, "max_position_embeddings": 514},
            513,
            512,
            "input_ids",
        ),
        ("OPTModel", {"num_hidden_layers": 1}, 2049, 2048, "input_ids"),
        (
            "WhisperForConditionalGeneration",
            {"encoder_layers": 1, "decoder_layers": 1},
            449,
            448,
            "decoder_input_ids",
        ),
    ],
)
def test_more_positions_than_the_table_has_are_refused(
    architecture: str, config: dict[str, Any], seq_len: int, most: int, what: str
) -> None:
    message = (
        f"seq_len={seq_len} is more than the {most} positions that {architecture} has for {what}"
    )
    with pytest.raises(SpecError, match=message):
        build(architecture, config=config, seq_len=seq_len)
    assert shapes(build(architecture, config=config, seq_len=most))[what][0] == (1, most)


@pytest.mark.parametrize(
    ("architecture", "config", "message"),
    [
        ("LlamaForCasualLM", {}, "not in transformers .* nearest: LlamaForCausalLM"),
        ("AutoModelForCausalLM", {}, "is not a model class"),
        ("LlamaConfig", {}, "is not a model class"),
        ("LlamaPreTrainedModel", {}, "has no forward of its own, it is a base class"),
        ("PreTrainedModel", {}, "has no forward of its own, it is a base class"),
        (
            "Qwen2_5OmniForConditionalGeneration",
            {},
            "made of several models; nearest: (?!Qwen2_5OmniForConditionalGeneration)",
        ),
        ("LlamaForCausalLM", {"hiden_size": 3}, "hiden_size is not a key .* nearest: hidden_size"),
        ("GPT2Model", {"rope_theta": 1e4}, "config.rope_theta is not a key of GPT2Config"),
        ("CLIPModel", {"text_config": {"hiden_size": 3}}, "text_config.hiden_size is not a key"),
        ("LlamaForCausalLM", {"torch_dtype": "float16"}, "set by model.dtype"),
        ("LlamaForCausalLM", {"hidden_size": "wide"}, "refuses .*expected int, got str"),
        (
            "BertModel",
            {"hidden_size": 100, "num_attention_heads": 7},
            "BertModel cannot be built .*100",
        ),
        (
            "LlamaForCausalLM",
            {"hidden_size": -64},
            "model.config.hidden_size=-64 must not be negative",
        ),
    ],
)
def test_mistakes_are_refused_in_one_line(
    architecture: str, config: dict[str, Any], message: str
) -> None:
    with pytest.raises(SpecError, match=message) as caught:
        build(architecture, config=config)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("architecture", ["ViTModel", "ASTModel"])
def test_a_length_is_refused_if_there_is_none(architecture: str) -> None:
    with pytest.raises(SpecError, match="no sequence length, got seq_len=128"):
        build(architecture, config={"num_hidden_layers": 1}, seq_len=128)


def test_invalid_tensor_sizes_are_named() -> None:
    with pytest.raises(
        SpecError, match=r"no tensors of model\.batch_size=10+ and model\.seq_len=9"
    ):
        build("LlamaForCausalLM", config=SMALL, batch_size=10**18, seq_len=9)


def test_an_input_of_unknown_shape_is_named() -> None:
    with pytest.raises(SpecError, match="Gemma3nAudioEncoder needs audio_mel, whose shape"):
        build("Gemma3nAudioEncoder", config={"conf_num_hidden_layers": 1})


def test_patches_fit_their_grid() -> None:
    """An image of 448 pixels for each text; the patches of two frames and three colours."""
    model = build("Qwen3VLVisionModel", config={"depth": 1}, batch_size=2)
    assert {name: like.shape for name, like in model.kwargs.items()} == {
        "hidden_states": (2 * 28 * 28, 3 * 2 * 16 * 16)
    }


def test_given_inputs_are_captured_and_placed() -> None:
    parts = {name: {"num_hidden_layers": 1, "image_size": 32} for name in ("vision_config",)}
    clip = build("CLIPModel", config={**parts, "text_config": {"num_hidden_layers": 1}})
    assert capture_graph(clip.module, clip.args, clip.kwargs).n_ops > 50


def test_every_parameter_is_on_the_requested_device() -> None:
    # Its weights are created by torch.Tensor(n), which ignores the default device.
    image_gpt = build("ImageGPTModel", config={"n_layer": 1}).module
    assert {weight.device.type for weight in image_gpt.parameters()} == {"meta"}


def test_the_cache_of_a_submodel_is_off_by_default() -> None:
    parts: dict[str, Any] = {
        "vision_config": {"num_hidden_layers": 1, "model_type": "clip_vision_model"},
        "text_config": {**SMALL, "model_type": "llama"},
    }
    for wanted in (False, True):
        module: Any = build("LlavaModel", config=parts).module
        assert module.config.text_config.use_cache is wanted
        parts["text_config"]["use_cache"] = True


def test_a_main_input_of_unknown_kind_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(self: object, smells: torch.Tensor) -> None: ...

    monkeypatch.setattr("transformers.ViTModel.main_input_name", "smells")
    monkeypatch.setattr("transformers.ViTModel.forward", forward)
    with pytest.raises(SpecError, match="ViTModel needs smells, whose shape"):
        build("ViTModel", config={"num_hidden_layers": 1})


def test_a_key_known_only_to_the_model_is_accepted() -> None:
    config = {**EXPERTS, "num_experts": 4, "head_dim": 16}
    module: Any = build("Qwen3MoeForCausalLM", config=config).module
    # 4 heads of 16; without the key, of 32 / 4 = 8.
    assert tuple(module.model.layers[0].self_attn.q_proj.weight.shape) == (4 * 16, 32)


def test_published_rope_keys_are_accepted() -> None:
    module: Any = build("LlamaForCausalLM", config={**SMALL, "rope_theta": 5e5}).module
    assert module.config.rope_parameters["rope_theta"] == 5e5


@pytest.mark.parametrize(
    ("architecture", "config"),
    [
        ("MixtralForCausalLM", {**EXPERTS, "num_local_experts": 4}),
        ("Qwen3MoeForCausalLM", {**EXPERTS, "num_experts": 4, "moe_intermediate_size": 16}),
    ],
)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_mixtures_of_experts_are_captured(
    architecture: str, config: dict[str, Any], dtype: str
) -> None:
    model = build(architecture, config=config, seq_len=8, batch_size=2, dtype=dtype)
    program = export_program(model.module, model.args, model.kwargs)
    # Only logits: no expert has data-dependent shapes, and no cache is returned.
    (logits,) = (out.meta["val"] for out in program.graph.output_node().args[0])
    assert tuple(logits.shape) == (2, 8, 50)


@pytest.mark.parametrize(
    ("architecture", "config"),
    [("LlamaForCausalLM", SMALL), ("GPT2LMHeadModel", {"n_layer": 2, "n_embd": 24})],
)
def test_a_requested_cache_is_an_output(architecture: str, config: dict[str, Any]) -> None:
    model = build(architecture, config={**config, "use_cache": True}, seq_len=8)
    program = export_program(model.module, model.args, model.kwargs)
    # Logits, and keys and values of two layers.
    assert len(program.graph.output_node().args[0]) == 1 + 2 * 2


def test_building_is_deterministic() -> None:
    first, second = (build("LlamaForCausalLM", config=SMALL, seq_len=8) for _ in range(2))
    assert shapes(first) == shapes(second)
    names = [[n for n, _ in model.module.named_parameters()] for model in (first, second)]
    assert names[0] == names[1]
