"""Options of vLLM that follow from how a plan computes prompts and products."""

from dataclasses import replace

from tests.plan_export.test_engines import SERVING, text_of


def test_a_pass_of_vllm_has_room_for_the_prompts_and_a_token_of_each_text() -> None:
    assert "max-num-batched-tokens" not in text_of(SERVING, "vLLM")
    in_turn = replace(SERVING, prefill_tokens=4096)
    assert "--max-num-batched-tokens 4096" in text_of(in_turn, "vLLM")
    many = replace(in_turn, prefill_tokens=16, batch_size=64)
    assert "--max-num-batched-tokens 64" in text_of(many, "vLLM")


def test_products_of_vllm_in_8_bits_are_named_where_they_are_not_planned() -> None:
    weights = replace(SERVING, weights="fp8")
    assert "weights.activations=fp8" in text_of(weights, "vLLM")
    assert "weights.activations" not in text_of(replace(weights, activations="fp8"), "vLLM")
