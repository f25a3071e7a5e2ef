"""The benchmark over all architectures: what it says of one that works and of one that cannot."""

from benchmarks.architecture_job import DEPTH, judge
from benchmarks.architectures import architectures, summary


def test_one_that_works_is_placed_at_two_layers() -> None:
    outcome = judge("ViTModel")
    assert (outcome.status, outcome.reason) == ("placed", "")
    assert outcome.inputs == "pixel_values[1, 3, 224, 224]"
    # A layer has some twenty operators.
    assert 20 * DEPTH < outcome.operators < 40 * DEPTH


def test_one_whose_input_is_not_known_is_refused_with_it() -> None:
    outcome = judge("MimiDecoderModel")
    assert outcome.status == "inputs"
    assert "needs latents" in outcome.reason


def test_one_whose_defaults_make_no_sense_is_given_what_it_leaves_out() -> None:
    outcome = judge("HunYuanDenseV1Model")
    assert outcome.status == "placed"
    assert outcome.inputs == "input_ids[1, 512] with {'head_dim': 128}"


def test_what_each_refusal_hides_is_completed_too() -> None:
    outcome = judge("EsmModel")
    assert outcome.status == "placed"
    assert "'vocab_size': 1024" in outcome.inputs
    assert "'pad_token_id': 1" in outcome.inputs


def test_one_of_any_kind_of_data_is_given_a_text() -> None:
    outcome = judge("PerceiverForMaskedLM")
    assert (outcome.status, outcome.inputs) == ("placed", "inputs[1, 512]")


def test_one_with_inputs_of_unknown_shapes_is_refused_by_their_names() -> None:
    outcome = judge("AutoformerModel")
    assert outcome.status == "inputs"
    assert "needs past_time_features" in outcome.reason


def test_all_registered_ones_are_gone_over_and_counted() -> None:
    names = architectures(bases_only=False)
    assert {"CLIPModel", "T5ForConditionalGeneration", "WhisperModel"} <= set(names)
    assert len(names) > len(architectures(bases_only=True)) > 400
    lines = list(summary([judge("ViTModel"), judge("AutoformerModel")], 3.0))
    assert lines[:2] == ["2 architectures in 3 s", "captured 1 (50.0%), placed 1"]
    assert lines[2] == "refused at inputs: 1"
