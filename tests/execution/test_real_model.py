"""Models with random weights: seeded, refused if too large, tokens in their vocabularies."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.utils._pytree import tree_leaves

from fxpart.capture.models.spec import ModelSpec
from fxpart.errors import CaptureError, SpecError
from fxpart.execution import real_model as real_models
from fxpart.execution.real_model import real_model
from tests.execution.scene import same_bits, small
from tests.execution.small_presets import SMALL_PRESETS

SOURCE = """
import torch
from torch import nn

class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4))

    def forward(self, x, factor=1.0):
        return self.weight * x * factor

class Count(nn.Module):
    def forward(self, x):
        return torch.arange(x.sum().item())

def scale(batch_size, dtype):
    return Scale().to(dtype), (torch.full((batch_size, 4), 3.0, dtype=dtype),), {"factor": 2.0}

def count(batch_size, dtype):
    return Count(), (torch.ones(3, dtype=torch.int64),)
"""


def factory(function: str) -> ModelSpec:
    return ModelSpec("mine", factory=f"real_models:{function}", batch_size=2)


@pytest.fixture
def _in_a_folder_with_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    monkeypatch.delitem(sys.modules, "real_models", raising=False)
    (tmp_path / "real_models.py").write_text(SOURCE)


@pytest.mark.parametrize("name", ["gpt2", "whisper_small", "resnet50", "dlrm"])
def test_all_tensors_are_real_and_on_one_device(name: str) -> None:
    real = small(name)
    inputs = [x for x in tree_leaves((real.args, real.kwargs)) if isinstance(x, torch.Tensor)]
    parameters = list(real.module.parameters())
    tensors = [*parameters, *real.module.buffers(), *inputs]
    assert {tensor.device.type for tensor in tensors} == {"cpu"}
    assert {p.dtype for p in parameters} == {torch.float32}
    assert not real.module.training
    assert real.device == torch.device("cpu")
    whole = real.program.module()
    # The exported module shares the weights of the model.
    assert {id(p) for p in whole.parameters()} == {id(p) for p in parameters}
    calls = [node.name for node in whole.graph.nodes if node.op == "call_function"]
    assert [call for call in calls if call in set(real.graph.names)] == list(real.graph.names)


@pytest.mark.parametrize("name", ["gpt2", "dlrm"])
def test_weights_and_inputs_depend_on_the_seed(name: str) -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first, again, other = (real_model(SMALL_PRESETS[name], seed=seed) for seed in (3, 3, 4))
    assert torch.equal(torch.get_rng_state(), before)
    state, inputs = dict(first.module.state_dict()), (first.args, first.kwargs)
    assert same_bits(dict(again.module.state_dict()), state)
    assert same_bits((again.args, again.kwargs), inputs)
    assert not same_bits(dict(other.module.state_dict()), state)
    assert not same_bits((other.args, other.kwargs), inputs)


@pytest.mark.parametrize("name", ["gpt2", "whisper_small"])
def test_tokens_are_in_the_vocabulary_and_vary(name: str) -> None:
    ids = [x for x in small(name).kwargs.values() if x.dtype == torch.int64]
    assert ids
    for tokens in ids:
        assert int(tokens.min()) >= 0
        assert int(tokens.max()) < 101
        assert len(tokens.unique()) > 3


@pytest.mark.usefixtures("_in_a_folder_with_models")
def test_inputs_of_a_factory_are_used_unchanged() -> None:
    real = real_model(replace(factory("scale"), dtype="float64"))
    assert torch.equal(real.args[0], torch.full((2, 4), 3.0, dtype=torch.float64))
    assert real.kwargs == {"factor": 2.0}
    assert real.module.weight.detach().abs().sum() > 0  # type: ignore[operator]


@pytest.mark.usefixtures("_in_a_folder_with_models")
def test_a_size_that_depends_on_values_cannot_be_captured() -> None:
    with pytest.raises(CaptureError, match="Count cannot be captured") as caught:
        real_model(factory("count"))
    assert "\n" not in str(caught.value)


def test_weights_that_do_not_fit_are_refused_before_they_are_created(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(real_models, "free_bytes", lambda _: 1000)
    monkeypatch.setattr(real_models, "seeded", None)
    message = (
        r"^running model gpt2 takes 118\.\d\d kB for weights, and cpu has 1\.00 kB left; make the"
        r" model smaller \(model\.config\), or plan without running it \(execute=none\)$"
    )
    with pytest.raises(SpecError, match=message):
        real_model(SMALL_PRESETS["gpt2"])
    with pytest.raises(SpecError, match=r"model\.factory_args"):
        real_model(SMALL_PRESETS["dlrm"])


def test_a_missing_device_is_refused() -> None:
    with pytest.raises(SpecError, match="is not here"):
        real_model(SMALL_PRESETS["gpt2"], device="cuda:99")
