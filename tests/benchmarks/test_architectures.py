"""The benchmark over all architectures: results for valid and invalid ones."""

from benchmarks.architecture_job import DEPTH, judge
from benchmarks.architectures import architectures, summary


def test_a_valid_architecture_is_placed_at_two_layers() -> None:
    outcome = judge("ViTModel")
    assert (outcome.status, outcome.reason) == ("placed", "")
    assert outcome.inputs == "pixel_values[1, 3, 224, 224]"
    # A layer has about twenty operators.
    assert 20 * DEPTH < outcome.operators < 40 * DEPTH


def test_an_architecture_with_an_unknown_input_is_refused_with_its_name() -> None:
    outcome = judge("MimiDecoderModel")
    assert outcome.status == "inputs"
    assert "needs latents" in outcome.reason


def test_inconsistent_defaults_are_completed() -> None:
    outcome = judge("HunYuanDenseV1Model")
    assert outcome.status == "placed"
    assert outcome.inputs == "input_ids[1, 512] with {'head_dim': 128}"


def test_successive_refusals_are_completed() -> None:
    outcome = judge("EsmModel")
    assert outcome.status == "placed"
    assert "'vocab_size': 1024" in outcome.inputs
    assert "'pad_token_id': 1" in outcome.inputs


def test_a_multimodal_architecture_gets_a_text() -> None:
    outcome = judge("PerceiverForMaskedLM")
    assert (outcome.status, outcome.inputs) == ("placed", "inputs[1, 512]")


def test_inputs_of_unknown_shapes_are_named() -> None:
    outcome = judge("AutoformerModel")
    assert outcome.status == "inputs"
    assert "needs past_time_features" in outcome.reason


def test_all_registered_architectures_are_counted() -> None:
    names = architectures(bases_only=False)
    assert {"CLIPModel", "T5ForConditionalGeneration", "WhisperModel"} <= set(names)
    assert len(names) > len(architectures(bases_only=True)) > 400
    lines = list(summary([judge("ViTModel"), judge("AutoformerModel")], 3.0))
    assert lines[:2] == ["2 architectures in 3 s", "captured 1 (50.0%), placed 1"]
    assert lines[2] == "refused at inputs: 1"
