"""Attention is captured as it runs: without a mask if none is given."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import masking_utils

from fxpart.capture.inference.export import export_program, unmasked_attention
from fxpart.capture.models.spec import ModelSpec
from fxpart.capture.training.joint import joint_capture
from tests.capture.small_specs import BERT, GPT2, LLAMA
from tests.capture.training.joint_scene import on_cpu

ATTENTION = torch.ops.aten.scaled_dot_product_attention.default
_ARGUMENTS = ("query", "key", "value", "attn_mask")
_SPECS = [GPT2, LLAMA, BERT]


def _masks(program: torch.export.ExportedProgram) -> list[Any]:
    calls = program.graph.find_nodes(op="call_function", target=ATTENTION)
    arguments = [{**dict(zip(_ARGUMENTS, c.args, strict=False)), **c.kwargs} for c in calls]
    return [call.get("attn_mask") for call in arguments]


@pytest.mark.parametrize("spec", _SPECS, ids=lambda spec: spec.name)
def test_no_mask_is_created_if_none_is_given(spec: ModelSpec) -> None:
    module, inputs = on_cpu(spec)
    program = export_program(module, (), inputs)
    assert _masks(program) == [None, None]
    with torch.no_grad():
        expected = module(**inputs).logits
        assert torch.equal(program.module()(**inputs).logits, expected)


@pytest.mark.parametrize("spec", _SPECS, ids=lambda spec: spec.name)
def test_a_given_mask_is_used(spec: ModelSpec) -> None:
    module, inputs = on_cpu(spec)
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    inputs["attention_mask"][0, 5:] = 0
    program = export_program(module, (), inputs)
    assert None not in _masks(program)
    with torch.no_grad():
        logits, expected = program.module()(**inputs).logits, module(**inputs).logits
    torch.testing.assert_close(logits, expected)


def test_a_training_step_creates_no_mask() -> None:
    module, inputs = on_cpu(LLAMA)
    assert _masks(joint_capture(module, (), inputs).forward) == [None, None]


def test_given_positions_may_pack_sequences() -> None:
    module, inputs = on_cpu(LLAMA)
    length = inputs["input_ids"].shape[1]
    inputs["position_ids"] = (torch.arange(length) % (length // 2)).expand(2, -1)
    program = export_program(module, (), inputs)
    assert None not in _masks(program)
    with torch.no_grad():
        logits, expected = program.module()(**inputs).logits, module(**inputs).logits
    torch.testing.assert_close(logits, expected)


def _questions() -> list[object]:
    names = ("is_torchdynamo_exporting", "find_packed_sequence_indices")
    return [getattr(masking_utils, name) for name in names]


def test_functions_are_restored_even_after_a_failure() -> None:
    before = _questions()

    def fail(x: Tensor) -> None:
        with unmasked_attention(lambda: None, (), {}):
            assert _questions() != before
            raise ValueError(x)

    with pytest.raises(ValueError, match="tensor"):
        fail(torch.zeros(1))
    assert _questions() == before


@pytest.mark.parametrize(
    ("forward", "args", "kwargs", "keeps"),
    [
        (lambda ids: ids, (0,), {}, False),
        (lambda ids, position_ids=None: ids, (0,), {}, False),
        (lambda ids, position_ids=None: ids, (0, 1), {}, True),
        (lambda ids, **more: ids, (0,), {"position_ids": 1}, True),
        (lambda *args: args, (0, 1), {}, True),
    ],
)
def test_a_mask_of_packed_sequences_is_kept_where_positions_may_be_given(
    forward: Callable[..., object],
    args: tuple[object, ...],
    kwargs: dict[str, object],
    keeps: bool,
) -> None:
    before = masking_utils.find_packed_sequence_indices
    with unmasked_attention(forward, args, kwargs):
        assert (masking_utils.find_packed_sequence_indices is before) == keeps
