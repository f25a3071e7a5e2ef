"""A model captured once for every batch size."""

import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from fxpart.capture.captured import captured_graph, captured_symbolic, symbols_named
from fxpart.capture.models.spec import ModelSpec
from fxpart.cost.all_reduce import partial_values
from fxpart.errors import CaptureError, SpecError

FACTORY = """
from torch import nn, zeros

def build(batch_size, dtype):
    return nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 2)), (zeros(batch_size, 8),)

class Conditional(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x):
        made = self.layer(x)
        return made.relu() + made if x.shape[0] > 16 else made

def conditional(batch_size, dtype):
    return Conditional(), (zeros(batch_size, 8),)

def at_least_eight(batch_size, dtype):
    if batch_size < 8:
        raise ValueError("a batch of 8 or more")
    return nn.Linear(8, 4), (zeros(batch_size, 8),)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "layered.py").write_text(FACTORY)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    yield tmp_path
    sys.modules.pop("layered", None)


def _spec(batch_size: int = 3, function: str = "build") -> ModelSpec:
    return ModelSpec(name="m", factory=f"layered:{function}", batch_size=batch_size)


def test_all_batch_sizes_share_an_entry(folder: Path) -> None:
    first = captured_symbolic(_spec(3), ("batch",), folder / "cache")
    again = captured_symbolic(_spec(64), ("batch",), folder / "cache")
    assert (first.from_cache, again.from_cache) == (False, True)
    for batch in (1, 5):
        fresh = captured_graph(_spec(batch), "operator", None).graph
        at = again.symbolic.at(batch=batch)
        assert at.value_bytes.tolist() == fresh.value_bytes.tolist()
        assert at.flops.tolist() == fresh.flops.tolist()
        assert at.names == fresh.names


@pytest.mark.parametrize("batches", [(3, 64, 5, 65), (64, 3, 65, 5)])
def test_a_condition_on_the_batch_holds_in_any_order_of_requests(
    folder: Path, batches: tuple[int, ...]
) -> None:
    captured = {
        batch: captured_symbolic(_spec(batch, "conditional"), ("batch",), folder / "cache")
        for batch in batches
    }
    # Batches for which the shared capture holds use it; each of the others has its own.
    small = [batch for batch in batches if batch <= 16]
    assert [captured[batch].from_cache for batch in small][1:] == [True]
    assert not captured[64].from_cache
    assert not captured[65].from_cache
    assert captured_symbolic(_spec(64, "conditional"), ("batch",), folder / "cache").from_cache
    assert captured[3].symbolic.ranges == captured[5].symbolic.ranges == ((1, 16),)
    assert captured[64].symbolic.ranges == captured[65].symbolic.ranges == ((17, None),)
    for batch, operators in ((3, 1), (64, 3)):
        fresh = captured_graph(_spec(batch, "conditional"), "operator", None).graph
        at = captured[batch].symbolic.at(batch=batch)
        assert at.names == fresh.names
        assert at.n_ops == operators
        assert at.value_bytes.tolist() == fresh.value_bytes.tolist()


def test_a_model_that_only_accepts_large_batches_is_captured_at_its_own(folder: Path) -> None:
    spec = _spec(32, "at_least_eight")
    captured = captured_symbolic(spec, ("batch",), folder / "cache")
    assert captured.symbolic.at(batch=32).value_bytes.max() == 32 * 8 * 4
    assert captured_symbolic(spec, ("batch",), folder / "cache").from_cache
    with pytest.raises(CaptureError, match="a batch of 8 or more"):
        captured_symbolic(_spec(7, "at_least_eight"), ("batch",), folder / "cache")


def test_a_training_step_has_its_own_entry(folder: Path) -> None:
    captured_symbolic(_spec(), ("batch",), folder / "cache")
    step = captured_symbolic(_spec(), ("batch",), folder / "cache", "training")
    assert not step.from_cache
    assert step.symbolic.graph.is_backward.any()
    assert captured_symbolic(_spec(), ("batch",), folder / "cache", "training").from_cache
    other = captured_symbolic(_spec(), ("batch",), folder / "cache", "training", train_mode=True)
    assert not other.from_cache


def test_the_batch_splits_activations_and_gradients_are_partial(folder: Path) -> None:
    step = captured_symbolic(_spec(), ("batch",), None, "training").symbolic
    graph, dims = step.graph, step.value_batch_dim
    assert set(dims[graph.gradient_values].tolist()) == {-2}
    assert dims[graph.value_names.index("relu")] == 0
    partial = partial_values(graph, dims)
    assert set(graph.gradient_values.tolist()) <= set(partial.tolist())
    # The loss is partial too, and nothing inside the model is.
    assert np.all(graph.value_is_output[partial])


def test_symbols_have_names() -> None:
    assert symbols_named("none") == ()
    assert symbols_named("batch_and_seq_len") == ("batch", "seq_len")
    with pytest.raises(SpecError, match=r"capture\.symbolic=bach does not exist; nearest: batch"):
        symbols_named("bach")


def test_the_batch_need_not_be_the_first_dimension(folder: Path) -> None:
    """As in an LSTM, time comes first. The batch is where the factory's inputs grow."""
    (folder / "timed.py").write_text(
        "from torch import nn, zeros\n"
        "class Timed(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.out = nn.Linear(8, 2)\n"
        "    def forward(self, x):\n"
        "        return self.out(x)[-1]\n"
        "def build(batch_size, dtype):\n"
        "    return Timed(), (zeros(4, batch_size, 8),)\n"
    )
    spec = ModelSpec(name="m", factory="timed:build", batch_size=3)
    step = captured_symbolic(spec, ("batch",), None, "training").symbolic
    graph, dims = step.graph, step.value_batch_dim
    assert len(graph.gradient_values) == 2
    assert set(dims[graph.gradient_values].tolist()) == {-2}
    assert dims[0] == 1
