"""Inputs of transformers models that images, recordings or codes reach in a form of their own."""

from typing import Any

import pytest
import torch

from fxpart.capture.inference.export import export_program
from fxpart.capture.models.build import build_model
from fxpart.capture.models.spec import ModelSpec
from fxpart.capture.training.joint import joint_capture
from fxpart.errors import SpecError

ONE = {"num_hidden_layers": 1}
STAGES = {"backbone_config": {"model_type": "resnet", "depths": [1, 1, 1, 1]}}
TIMES = {"prediction_length": 6, "context_length": 12, "num_time_features": 2}


def shapes(architecture: str, config: dict[str, Any], seq_len: int | None) -> dict[str, Any]:
    """Return the shapes of the inputs for a batch of 2."""
    spec = ModelSpec("m", architecture, config=config, seq_len=seq_len, batch_size=2)
    return {name: tuple(like.shape) for name, like in build_model(spec).kwargs.items()}


@pytest.mark.parametrize(
    ("architecture", "config", "seq_len", "expected"),
    [
        # T5 makes the mask itself, LongT5 cuts the given one into blocks.
        (
            "LongT5Model",
            {"num_layers": 1, "num_decoder_layers": 1},
            8,
            {"input_ids": (2, 8), "attention_mask": (2, 8), "decoder_input_ids": (2, 8)},
        ),
        ("BrosModel", ONE, 8, {"input_ids": (2, 8), "bbox": (2, 8, 4)}),
        # Which patches of its image are kept depends on the values of the boxes.
        (
            "UdopModel",
            {"num_layers": 1},
            8,
            {
                "input_ids": (2, 8),
                "attention_mask": (2, 8),
                "bbox": (2, 8, 4),
                "decoder_input_ids": (2, 8),
            },
        ),
        # A row, a last dimension, or a text token and a code for each of the code books.
        ("MusicgenModel", ONE, 8, {"input_ids": (2 * 4, 8)}),
        (
            "DiaModel",
            {"encoder_config": ONE, "decoder_config": ONE},
            8,
            {"input_ids": (2, 8), "decoder_input_ids": (2, 8, 9)},
        ),
        (
            "KyutaiSpeechToTextModel",
            {**ONE, "codec_config": {"model_type": "mimi", **ONE}},
            8,
            {"input_ids": (2, 8, 32 + 1)},
        ),
        # 512 rows, one for the padding and one for the token after the last.
        (
            "ProphetNetModel",
            {"num_encoder_layers": 1, "num_decoder_layers": 1},
            None,
            {"input_ids": (2, 510), "decoder_input_ids": (2, 510)},
        ),
        (
            "DecisionTransformerModel",
            {"n_layer": 1},
            8,
            {
                "states": (2, 8, 17),
                "actions": (2, 8, 4),
                "returns_to_go": (2, 8, 1),
                "timesteps": (2, 8),
            },
        ),
        # 12 values and 7 before them for the lags.
        (
            "TimeSeriesTransformerModel",
            {**TIMES, "encoder_layers": 1, "decoder_layers": 1},
            None,
            {
                "past_values": (2, 19),
                "past_time_features": (2, 19, 2),
                "past_observed_mask": (2, 19),
                "future_time_features": (2, 6, 2),
                "future_values": (2, 6),
            },
        ),
        ("PerceiverModel", {"d_model": 64}, 8, {"inputs": (2, 8, 64)}),
    ],
)
def test_sequences(
    architecture: str, config: dict[str, Any], seq_len: int | None, expected: dict[str, Any]
) -> None:
    assert shapes(architecture, config, seq_len) == expected


@pytest.mark.parametrize(
    ("architecture", "config", "expected"),
    [
        # 10 x 10 patches of 30 x 30 pixels; NeoMME takes those of all images together.
        (
            "FuyuModel",
            {"text_config": {"model_type": "persimmon", **ONE}},
            {"input_ids": (2, 512), "pixel_values": (2, 100, 3 * 30 * 30)},
        ),
        (
            "NeoMMEForMaskedLM",
            ONE,
            {"input_ids": (2, 512), "pixel_values": (2 * 49, 3 * 32 * 32)},
        ),
        # The grids of Molmo's images are values.
        ("Molmo2Model", {"text_config": ONE}, {"input_ids": (2, 512)}),
        # The smallest of three copies, a quarter as large, has one patch of 384 pixels.
        (
            "DepthProModel",
            {
                f"{part}_model_config": {"model_type": "dinov2", **ONE}
                for part in ("image", "patch", "fov")
            },
            {"pixel_values": (2, 3, 4 * 384, 4 * 384)},
        ),
        # 35 x 35 patches of 32 pixels, the smaller number of patches that has queries.
        (
            "AriaModel",
            {"text_config": ONE, "vision_config": {"model_type": "idefics3_vision", **ONE}},
            {"input_ids": (2, 512), "pixel_values": (2, 3, 35 * 32, 35 * 32)},
        ),
        # Half of the picture of 896 x 448; the other half is the prompt.
        (
            "SegGptModel",
            {**ONE, "intermediate_hidden_state_indices": [0], "merge_index": 0},
            dict.fromkeys(
                ("pixel_values", "prompt_pixel_values", "prompt_masks"), (2, 3, 448, 448)
            ),
        ),
        # A row of 4 x 4 patches of 16 x 16 pixels for each image.
        (
            "Siglip2Model",
            {"text_config": ONE, "vision_config": {**ONE, "num_patches": 16}},
            {
                "input_ids": (2, 64),
                "pixel_values": (2, 16, 3 * 16 * 16),
                "pixel_attention_mask": (2, 16),
            },
        ),
        # An image of 32 x 32 patches of 14 x 14 pixels for each of two texts.
        ("Kimi_K25VisionModel", ONE, {"pixel_values": (2 * 1024, 3, 14, 14)}),
        # Images are inserted at placeholder tokens; text alone is valid.
        ("Lfm2VlModel", {"text_config": ONE}, {"input_ids": (2, 512)}),
        ("PPOCRV6TinyRecForTextRecognition", {}, {"pixel_values": (2, 3, 48, 224)}),
        ("EfficientLoFTRModel", {}, {"pixel_values": (2, 2, 3, 224, 224)}),
        (
            "XCLIPModel",
            {"text_config": ONE, "vision_config": {**ONE, "num_frames": 4}},
            {"input_ids": (2, 77), "pixel_values": (2, 4, 3, 224, 224)},
        ),
        (
            "TvpModel",
            {**ONE, **STAGES},
            {"input_ids": (2, 512), "pixel_values": (2, 48, 3, 448, 448)},
        ),
        # A row, a column, and 16 x 16 pixels of 3 colours.
        ("Pix2StructVisionModel", {**ONE, "seq_len": 64}, {"flattened_patches": (2, 64, 770)}),
        # GroundingDINO's logits have a place for each of 256 tokens of text.
        (
            "GroundingDinoModel",
            {"encoder_layers": 1, "decoder_layers": 1},
            {"pixel_values": (2, 3, 224, 224), "input_ids": (2, 256)},
        ),
    ],
)
def test_images(architecture: str, config: dict[str, Any], expected: dict[str, Any]) -> None:
    assert shapes(architecture, config, None) == expected


@pytest.mark.parametrize(
    ("architecture", "config", "expected"),
    [
        # Eight frames of 128 bins, which the model joins itself.
        ("Nemotron3DiarizationAudioModel", ONE, {"input_features": (2, 1024, 128)}),
        # Four frames of 80 bins at once.
        ("GraniteSpeech5Encoder", ONE, {"input_features": (2, 1024, 4 * 80)}),
        (
            "FunAsrNanoEncoder",
            {**ONE, "num_timestamp_prediction_layers": 1},
            {"input_features": (2, 1024, 560), "input_features_mask": (2, 1024)},
        ),
        # A spectrogram read as an image, and one beside a text.
        ("ClapAudioModel", {"depths": [1, 1, 1, 1]}, {"input_features": (2, 1, 1024, 64)}),
        (
            "ClvpModelForConditionalGeneration",
            {f"{part}_config": ONE for part in ("text", "speech", "decoder")},
            {"input_ids": (2, 512), "input_features": (2, 80, 1024)},
        ),
        ("XcodecModel", {}, {"input_values": (2, 1, 160_000)}),
        ("PeAudioEncoder", ONE, {"input_values": (2, 1, 160_000)}),
        ("VibeVoiceAcousticTokenizerEncoderModel", {}, {"hidden_states": (2, 1, 160_000)}),
        ("VibeVoiceAcousticTokenizerDecoderModel", {}, {"hidden_states": (2, 64, 125)}),
        (
            "SpeechEncoderDecoderModel",
            {
                "encoder": {"model_type": "wav2vec2", **ONE},
                "decoder": {"model_type": "bert", **ONE},
            },
            {"inputs": (2, 160_000), "decoder_input_ids": (2, 512)},
        ),
    ],
)
def test_recordings(architecture: str, config: dict[str, Any], expected: dict[str, Any]) -> None:
    assert shapes(architecture, config, None) == expected


def test_rows_of_patches_are_captured_as_they_run() -> None:
    """SigLIP 2 resizes its table of positions to the shape of each image, which is bound to it."""
    config = {**ONE, "hidden_size": 16, "num_attention_heads": 2, "num_patches": 9}
    spec = ModelSpec("m", "Siglip2VisionModel", config, batch_size=2)
    built = build_model(spec, torch.device("cpu"))
    with torch.no_grad():
        result = built.module(**built.kwargs).last_hidden_state
        program = export_program(built.module, (), built.kwargs)
        captured = program.module()(**built.kwargs).last_hidden_state
    assert result.shape == (2, 9, 16)
    torch.testing.assert_close(captured, result)


def test_a_model_that_hashes_its_tokens_runs() -> None:
    config = {**ONE, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 16}
    spec = ModelSpec("m", "CanineModel", config, batch_size=2, seq_len=16)
    built = build_model(spec, torch.device("cpu"))
    with torch.no_grad():
        result = built.module(**built.kwargs).last_hidden_state
    assert result.shape == (2, 16, 16)
    assert int(built.kwargs["input_ids"].max()) > 100  # of 16,384 buckets


_VIDEO = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "decoder_hidden_size": 16,
    "decoder_num_hidden_layers": 1,
    "decoder_num_attention_heads": 2,
    "decoder_intermediate_size": 32,
    "image_size": 32,
    "patch_size": 8,
    "num_frames": 6,
}


def test_a_video_is_filled_in_where_a_mask_hides_it() -> None:
    """Three pairs of frames with 4 x 4 patches, of which 90 % are hidden."""
    spec = ModelSpec("m", "VideoMAEForPreTraining", _VIDEO, batch_size=2, loss="own")
    planned, real = build_model(spec), build_model(spec, torch.device("cpu"))
    for built in (planned, real):
        mask = built.kwargs["bool_masked_pos"]
        assert (mask.shape, mask.dtype) == ((2, 3 * 16), torch.bool)
    assert real.kwargs["bool_masked_pos"].sum(dim=1).tolist() == [43, 43]
    graph = joint_capture(planned.module, (), planned.kwargs).graph
    assert graph.targets[graph.first_backward - 1] == "aten.mse_loss.default"
    # Predicted are pairs of hidden patches of 8 x 8 pixels of 3 colours, so is the loss's storage.
    loss = graph.value_producer == graph.first_backward - 1
    assert graph.value_alloc_bytes[loss].tolist() == [2 * 43 * 2 * 8 * 8 * 3 * 4]
    real.module(**real.kwargs)["loss"].backward()


def test_a_part_takes_a_key_that_only_the_model_knows() -> None:
    """Published DBRX has ``attn_config.rope_theta``, which its configuration class lacks."""
    small = {"n_layers": 1, "d_model": 32, "n_heads": 4, "vocab_size": 50}
    heads = {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 5e5}
    config = {**small, "attn_config": heads, "ffn_config": {"ffn_hidden_size": 16}}
    module: Any = build_model(ModelSpec("m", "DbrxModel", config=config, seq_len=8)).module
    assert module.config.attn_config.rope_theta == 5e5
    assert {weight.dtype for weight in module.parameters()} == {torch.float32}
    config["attn_config"] = {**heads, "rope_thetas": 1.0}
    with pytest.raises(SpecError, match=r"config\.attn_config\.rope_thetas is not a key"):
        build_model(ModelSpec("m", "DbrxModel", config=config))
