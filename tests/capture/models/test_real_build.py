"""Models built on a real device: random weights, and inputs in the valid range of the model."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from fxpart.capture.models.build import build_model
from fxpart.capture.models.dlrm import dlrm
from fxpart.capture.models.inputs import drawn_inputs
from fxpart.capture.models.spec import ModelSpec
from fxpart.errors import SpecError

CPU = torch.device("cpu")
BART = ModelSpec(
    "bart",
    architecture="BartForConditionalGeneration",
    config={
        "vocab_size": 37,
        "d_model": 16,
        "encoder_layers": 1,
        "decoder_layers": 1,
        "encoder_attention_heads": 2,
        "decoder_attention_heads": 2,
        "encoder_ffn_dim": 16,
        "decoder_ffn_dim": 16,
        "pad_token_id": 1,
        "bos_token_id": 0,
        "eos_token_id": 2,
        "decoder_start_token_id": 2,
        "forced_eos_token_id": 2,
    },
    batch_size=3,
    seq_len=50,
)
SOURCE = """
import torch
from torch import nn

class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(2, 2)
        self.b = nn.Linear(2, 2)
        self.b.weight = self.a.weight

def tied(batch_size, dtype):
    return Tied(), (torch.full((batch_size, 2), 7.0),)
"""


def _like(name: str, *shape: int, dtype: torch.dtype = torch.int64) -> dict[str, torch.Tensor]:
    return {name: torch.empty(*shape, dtype=dtype, device="meta")}


def test_an_encoder_and_a_decoder_get_tokens_of_their_vocabularies() -> None:
    built = build_model(BART, CPU)
    assert list(built.kwargs) == ["input_ids", "decoder_input_ids"]
    for tokens in built.kwargs.values():
        assert tuple(tokens.shape) == (3, 50)
        # Of 150 draws from 37, hardly one is missing.
        assert set(tokens.flatten().tolist()) <= set(range(37))
        assert len(set(tokens.flatten().tolist())) > 20
    weights = [p for p in built.module.parameters() if p.dim() > 1]
    assert all(p.device == CPU for p in weights)
    assert all(float(p.detach().std()) > 0 for p in weights)
    built.module(**built.kwargs)


def test_without_a_device_everything_is_on_meta() -> None:
    built = build_model(BART)
    assert all(t.is_meta for t in [*built.module.parameters(), *built.kwargs.values()])


def test_real_values_are_normally_distributed() -> None:
    drawn = drawn_inputs(nn.Identity(), _like("pixel_values", 9, 999, dtype=torch.float64), CPU)
    assert drawn["pixel_values"].dtype == torch.float64
    assert abs(float(drawn["pixel_values"].mean())) < 0.1
    assert abs(float(drawn["pixel_values"].std()) - 1) < 0.1


def _model(table: object = None, stated: object = None) -> SimpleNamespace:
    text = SimpleNamespace() if stated is None else SimpleNamespace(vocab_size=stated)
    config = SimpleNamespace(get_text_config=lambda: text)
    return SimpleNamespace(config=config, get_input_embeddings=lambda: table)


def test_a_vocabulary_is_its_table_or_the_configured_size() -> None:
    ids = drawn_inputs(_model(nn.Embedding(2, 1), 99), _like("input_ids", 200), CPU)["input_ids"]
    assert set(ids.tolist()) == {0, 1}
    ids = drawn_inputs(_model(nn.Linear(2, 2), 3), _like("input_ids", 200), CPU)["input_ids"]
    assert set(ids.tolist()) == {0, 1, 2}


def test_an_unknown_vocabulary_size_is_refused() -> None:
    with pytest.raises(SpecError, match="takes input_ids, but does not say how many tokens"):
        drawn_inputs(_model(), _like("input_ids", 2), CPU)


def test_a_factory_builds_on_the_device_and_keeps_its_ties(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    (tmp_path / "tied_models.py").write_text(SOURCE)
    built = build_model(ModelSpec("m", factory="tied_models:tied", batch_size=2), CPU)
    assert built.module.a.weight is built.module.b.weight  # type: ignore[union-attr]
    assert torch.equal(built.args[0], torch.full((2, 2), 7.0))
    assert not built.module.training


def test_inputs_of_dlrm_are_rows_of_each_table() -> None:
    torch.manual_seed(0)
    _, (dense, indices) = dlrm(50, torch.float32, embedding_dim=2, rows=(3, 700), pooling=4)
    assert len(set(dense.flatten().tolist())) > 600
    assert set(indices[0].flatten().tolist()) == {0, 1, 2}
    assert indices[1].max() < 700
    assert len(set(indices[1].flatten().tolist())) > 100
    assert all(index.dtype == torch.int64 for index in indices)


def test_no_position_is_masked_from_attention() -> None:
    masks = {**_like("attention_mask", 5), **_like("decoder_attention_mask", 5)}
    drawn = drawn_inputs(nn.Identity(), masks, CPU)
    assert [mask.tolist() for mask in drawn.values()] == [[1] * 5, [1] * 5]
