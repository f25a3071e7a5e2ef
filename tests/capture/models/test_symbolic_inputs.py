"""Input dimensions that are the batch or the sequence, for transformers and for factories."""

import pytest
import torch
from torch import Tensor, nn

from fxpart.capture.models.spec import ModelSpec
from fxpart.capture.models.symbolic_inputs import symbolic_inputs
from fxpart.capture.symbolic.dims import SymbolicDim
from fxpart.errors import CaptureError, SpecError
from tests.execution.small_presets import SMALL_PRESETS


def bags(batch_size: int, dtype: torch.dtype) -> tuple[nn.Module, tuple[Tensor, list[Tensor]]]:
    """Return a model and (B, 4), [(3 B + 1,), (7,)]."""
    dense = torch.zeros(batch_size, 4, dtype=dtype)
    return nn.Linear(4, 4), (dense, [torch.zeros(3 * batch_size + 1), torch.zeros(7)])


def squared(batch_size: int, dtype: torch.dtype) -> tuple[nn.Module, tuple[Tensor]]:
    """Return a model and (B * B, 4)."""
    return nn.Linear(4, 4), (torch.zeros(batch_size**2, 4, dtype=dtype),)


def weighted(batch_size: int, dtype: torch.dtype) -> tuple[nn.Module, tuple[Tensor]]:
    """Return a model with a weight of (B, 4) and (B, 4)."""
    return nn.Linear(4, batch_size), (torch.zeros(batch_size, 4, dtype=dtype),)


def fixed(batch_size: int, dtype: torch.dtype) -> tuple[nn.Module, tuple[Tensor]]:
    """Return a model and (5, 4), whatever the batch."""
    return nn.Linear(4, 4), (torch.zeros(5, 4, dtype=dtype),)


def flat(batch_size: int, dtype: torch.dtype, seq_len: int) -> tuple[nn.Module, tuple[Tensor]]:
    """Return a model and (B * S, 4): both symbols in one dimension."""
    return nn.Linear(4, 4), (torch.zeros(batch_size * seq_len, 4, dtype=dtype),)


def _factory(function: object, seq_len: int | None = None) -> ModelSpec:
    name = getattr(function, "__name__", "")
    return ModelSpec(name, factory=f"{__name__}:{name}", batch_size=1, seq_len=seq_len)


def test_a_text_has_both_symbols() -> None:
    inputs = symbolic_inputs(SMALL_PRESETS["gpt2"], ("batch", "seq_len"))
    assert inputs.dims == (SymbolicDim(0, 0, "batch"), SymbolicDim(0, 1, "seq_len"))
    # Its table has 32 positions.
    assert inputs.ranges == {"batch": (1, None), "seq_len": (1, 32)}


def test_an_encoder_and_a_decoder_share_their_symbols() -> None:
    inputs = symbolic_inputs(SMALL_PRESETS["t5_large"], ("batch", "seq_len"))
    assert {(dim.leaf, dim.dim, dim.symbol) for dim in inputs.dims} == {
        (leaf, dim, symbol) for leaf in (0, 1) for dim, symbol in enumerate(("batch", "seq_len"))
    }
    assert inputs.ranges["seq_len"] == (1, None)


def test_only_the_text_of_a_speech_model_has_a_sequence() -> None:
    inputs = symbolic_inputs(SMALL_PRESETS["whisper_small"], ("seq_len",))
    assert len(inputs.dims) == 1
    assert inputs.ranges["seq_len"] == (1, 16)


@pytest.mark.parametrize("name", ["gpt2", "vit_large"])
def test_the_batch_differs_from_all_other_sizes(name: str) -> None:
    inputs = symbolic_inputs(SMALL_PRESETS[name])
    tensors = [*inputs.built.module.parameters(), *inputs.built.module.buffers()]
    (batch,) = {int(value.shape[0]) for value in inputs.built.kwargs.values()}
    assert batch >= 2
    assert all(batch not in tensor.shape for tensor in tensors)
    assert sum(list(value.shape).count(batch) for value in inputs.built.kwargs.values()) == 1


def test_a_sequence_stays_within_the_positions() -> None:
    spec = SMALL_PRESETS["gpt2"]
    for length in (1, 2, 32):
        at_most = ModelSpec("gpt2", "GPT2LMHeadModel", spec.config, batch_size=1, seq_len=length)
        inputs = symbolic_inputs(at_most, ("seq_len",))
        assert 2 <= inputs.built.kwargs["input_ids"].shape[1] <= 32


def test_multiples_in_a_factory_are_found() -> None:
    inputs = symbolic_inputs(_factory(bags))
    assert inputs.dims == (SymbolicDim(0, 0, "batch"), SymbolicDim(1, 0, "batch", 3, 1))
    batch = inputs.built.args[0].shape[0]
    assert inputs.built.args[1][0].shape == (3 * batch + 1,)


def test_other_growth_is_refused() -> None:
    with pytest.raises(CaptureError, match="not a multiple of it plus a constant"):
        symbolic_inputs(_factory(squared))


def test_weights_that_grow_are_refused() -> None:
    with pytest.raises(CaptureError, match=r"^batch cannot be symbolic: the weights .* differ"):
        symbolic_inputs(_factory(weighted))


def test_models_that_need_numbers_of_images_are_refused() -> None:
    sizes = {"depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16}
    config = {**sizes, "out_hidden_size": 16, "patch_size": 112, "deepstack_visual_indexes": [0]}
    spec = ModelSpec("images", architecture="Qwen3VLVisionModel", config=config, batch_size=2)
    with pytest.raises(
        SpecError, match=r"given by number \(grid_thw\).*leave out capture.symbolic"
    ):
        symbolic_inputs(spec)


def test_the_size_of_the_spec_is_used_unless_another_dimension_has_it() -> None:
    sizes = {}
    for batch in (4, 6, 7):
        spec = ModelSpec("bags", factory=f"{__name__}:bags", batch_size=batch)
        sizes[batch] = symbolic_inputs(spec).built.args[0].shape[0]
    # Weights have 4, and another input 7.
    assert sizes == {4: 5, 6: 6, 7: 8}


@pytest.mark.parametrize(
    ("spec", "symbols", "message"),
    [
        (_factory(fixed), ("batch",), "no input of model fixed grows with batch"),
        (_factory(flat, 3), ("batch", "seq_len"), "one dimension that grows with both batch and"),
        (_factory(fixed), ("seq_len",), "states no sequence length"),
        (_factory(fixed), ("bach",), "symbolic=bach does not exist; nearest: batch"),
        (_factory(fixed), (), "must be one or more of"),
        (_factory(fixed), ("batch", "batch"), "each once"),
    ],
)
def test_models_without_symbols_are_refused(
    spec: ModelSpec, symbols: tuple[str, ...], message: str
) -> None:
    with pytest.raises(SpecError, match=message):
        symbolic_inputs(spec, symbols)
