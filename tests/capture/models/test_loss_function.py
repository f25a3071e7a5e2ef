"""A user's loss function, and what it must return."""

from pathlib import Path

import pytest

from fxpart.capture.models.build import build_model
from fxpart.capture.models.spec import ModelSpec
from fxpart.capture.training.joint import joint_graph
from fxpart.core.graph import OpGraph
from fxpart.errors import SpecError

_SOURCE = """
import torch
from torch import nn

def model(batch_size, dtype):
    return nn.Linear(4, 2, dtype=dtype), (torch.zeros(batch_size, 4, dtype=dtype),)

def mean(result, inputs):
    return (result - inputs["input"][:, :2]).mean()

def rows(result, inputs):
    return result.mean(1)

def number(result, inputs):
    return result.mean().item()

def whole(result, inputs):
    return result.argmax()

def detached(result, inputs):
    return result.mean().detach()

def without_gradients(result, inputs):
    with torch.no_grad():
        return result.mean()

def of_inputs(result, inputs):
    return inputs["input"].mean()
"""


@pytest.fixture(autouse=True)
def _source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "users_losses.py").write_text(_SOURCE)
    monkeypatch.syspath_prepend(tmp_path)


def _step(loss: str) -> OpGraph:
    spec = ModelSpec("mine", factory="users_losses:model", loss=f"users_losses:{loss}")
    built = build_model(spec)
    return joint_graph(built.module, built.args, built.kwargs)


def test_a_step_ends_in_the_loss() -> None:
    assert len(_step("mean").gradient_weights) == 2


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        ("rows", r"a tensor of shape \(\d,\); return a tensor of one number"),
        ("number", "a number of Python; return a tensor of one number"),
        ("whole", "a tensor of torch.int64; return a floating-point one"),
        ("detached", "a tensor that depends on no weight with a gradient; .* without detach"),
        ("without_gradients", "a tensor that depends on no weight with a gradient"),
        ("of_inputs", "a tensor that depends on no weight with a gradient"),
    ],
)
def test_another_result_is_refused(loss: str, message: str) -> None:
    with pytest.raises(SpecError, match=rf"^model.loss=users_losses:{loss} returned {message}"):
        _step(loss)
