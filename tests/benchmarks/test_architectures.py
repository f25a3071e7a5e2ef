"""The benchmark over all architectures: results for valid and invalid ones."""

from typing import Any

import pytest

from benchmarks.architecture_job import DEPTH, _missing_settings, _shallow_config, judge
from benchmarks.architectures import architectures, summary


def test_a_valid_architecture_is_placed_at_two_layers() -> None:
    outcome = judge("ViTModel")
    assert (outcome.status, outcome.reason) == ("placed", "")
    assert outcome.inputs == "pixel_values[1, 3, 224, 224]"
    # A layer has about twenty operators.
    assert 20 * DEPTH < outcome.operators < 40 * DEPTH


def test_an_architecture_with_an_unknown_input_is_refused_with_its_name() -> None:
    outcome = judge("Gemma3nAudioEncoder")
    assert outcome.status == "inputs"
    assert "needs audio_mel" in outcome.reason


def test_inconsistent_defaults_are_completed() -> None:
    outcome = judge("HunYuanDenseV1Model")
    assert outcome.status == "placed"
    assert outcome.inputs == "input_ids[1, 512] with {'head_dim': 128}"


def test_successive_refusals_are_completed() -> None:
    outcome = judge("EsmModel")
    assert outcome.status == "placed"
    assert "'vocab_size': 1024" in outcome.inputs
    assert "'pad_token_id': 1" in outcome.inputs


ROTARY = {"rope_type": "default", "rope_theta": 10_000.0}


@pytest.mark.parametrize(
    ("architecture", "reason", "added"),
    [
        (
            "CohereCompassTextModel",
            "KeyError: 'full_attention'",
            {"rope_parameters": {"full_attention": ROTARY}},
        ),
        (
            "Lfm2MoeModel",
            "'NoneType' object is not subscriptable",
            {"layer_types": ["full_attention", "full_attention"]},
        ),
        (
            "ConvNextBackbone",
            'can only concatenate list (not "tuple") to list',
            {"hidden_sizes": [96, 192, 384, 768], "depths": [3, 3, 9, 3]},
        ),
        (
            "LwDetrModel",
            "cat expects at least one tensor",
            {"projector_scale_factors": [1.0]},
        ),
        (
            "DbrxModel",
            "'DbrxAttentionConfig' object has no attribute 'rope_theta'",
            {"attn_config": {"rope_theta": 1e4}},
        ),
    ],
)
def test_a_setting_is_chosen_by_the_error(
    architecture: str, reason: str, added: dict[str, Any]
) -> None:
    assert dict(_missing_settings(architecture, reason)) == added


def test_a_reduced_backbone_returns_the_stages_that_the_model_reads() -> None:
    name = "PPOCRV5ServerDetForObjectDetection"
    alone = _shallow_config(name, with_lists=True)["backbone_config"]
    assert alone == {"model_type": "hgnet_v2", "depths": [2, 2, 2, 2]}
    whole = _shallow_config(name, with_lists=True, with_parts=True)["backbone_config"]
    assert whole == alone | {"out_features": ["stage1", "stage2", "stage3", "stage4"]}


def test_a_multimodal_architecture_gets_a_text() -> None:
    outcome = judge("PerceiverForMaskedLM")
    assert (outcome.status, outcome.inputs) == ("placed", "inputs[1, 512]")


def test_inputs_of_unknown_shapes_are_named() -> None:
    outcome = judge("PI0Model")
    assert outcome.status == "inputs"
    assert "needs action_embeds" in outcome.reason


def test_all_registered_architectures_are_counted() -> None:
    names = architectures(bases_only=False)
    assert {"CLIPModel", "T5ForConditionalGeneration", "WhisperModel"} <= set(names)
    assert len(names) > len(architectures(bases_only=True)) > 400
    lines = list(summary([judge("ViTModel"), judge("Gemma3nAudioEncoder")], 3.0))
    assert lines[:2] == ["2 architectures in 3 s", "captured 1 (50.0%), placed 1"]
    assert lines[2] == "refused at inputs: 1"
