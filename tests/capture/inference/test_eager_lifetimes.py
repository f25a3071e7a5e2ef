"""Lifetimes of values held by Python: by hand, and as counted in real eager calls."""

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fxpart.capture.api import capture_graph
from fxpart.capture.models.build import build_model
from fxpart.capture.training.joint import joint_capture
from fxpart.core.graph import OpGraph, without_python
from fxpart.core.phases import StepOptions
from fxpart.cost.evaluate import peak_bytes
from fxpart.cost.tables import memory_tables
from fxpart.errors import CaptureError
from fxpart.execution.real_step import forward_peak_bytes, step_peak_bytes
from tests.execution.small_presets import SMALL_PRESETS


def _peak_bytes(graph: OpGraph) -> int:
    on_one = np.zeros(graph.n_ops, dtype=np.int64)
    return int(peak_bytes(memory_tables(graph), on_one, 1)[0])


class Local(nn.Module):
    """Its ``first`` is read once and kept to the end."""

    def forward(self, x: Tensor) -> Tensor:
        first = x + 1
        second = first * 2
        return second.neg().exp()


class Rebound(nn.Module):
    """The same, with each result replacing the last."""

    def forward(self, x: Tensor) -> Tensor:
        x = x + 1
        x = x * 2
        return x.neg().exp()


class Calls(nn.Module):
    """An argument is kept alive by the call, although the caller drops it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Rebound()

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.inner(x.cos())
        return result


def _held(module: nn.Module) -> dict[str, str]:
    """Return for each value the operator after which Python drops it."""
    graph = capture_graph(module, (torch.ones(4, device="meta"),))
    return {
        name: graph.names[op]
        for name, op in zip(graph.value_names, graph.value_held, strict=True)
        if op >= 0
    }


def test_a_local_variable_lives_until_its_function_returns() -> None:
    assert _held(Local()) == {"add": "exp", "mul": "exp", "neg": "exp"}
    assert _held(Rebound()) == {"add": "mul", "mul": "exp", "neg": "exp"}


def test_an_argument_lives_until_the_call_returns() -> None:
    assert _held(Calls())["cos"] == "exp"


@pytest.mark.parametrize("module", [Local(), Rebound(), Calls()])
def test_the_peak_equals_that_of_a_real_call(module: nn.Module) -> None:
    x = torch.ones(1000)
    assert _peak_bytes(capture_graph(module, (x,))) == forward_peak_bytes(module, (x,))


def test_the_graph_alone_has_a_lower_peak() -> None:
    x = torch.ones(1000)
    assert _peak_bytes(without_python(capture_graph(Local(), (x,)))) == 3 * 4000
    assert _peak_bytes(capture_graph(Local(), (x,))) == 5 * 4000


@pytest.mark.parametrize("name", ["gpt2", "dlrm", "resnet50", "vit_large", "mixtral_8x7b"])
def test_published_architectures_are_within_two_percent_of_a_real_call(name: str) -> None:
    spec = SMALL_PRESETS[name]
    planned, real = build_model(spec), build_model(spec, torch.device("cpu"))
    graph = capture_graph(planned.module, planned.args, planned.kwargs)
    counted = forward_peak_bytes(real.module, real.args, real.kwargs)
    assert abs(_peak_bytes(graph) / counted - 1) < 0.02


def test_a_model_that_cannot_be_captured_is_refused() -> None:
    class Branches(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.cos() if x.sum() > 0 else x

    with pytest.raises(CaptureError, match="branches on the values of a tensor"):
        capture_graph(Branches(), (torch.ones(4),))


class Wide(nn.Module):
    """A local variable that no gradient needs, and that outlives its reader."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 1000), nn.Linear(1000, 4)

    def forward(self, x: Tensor) -> Tensor:
        wide = self.first(x)
        shifted = wide + 1
        halved = shifted * 0.5
        result: Tensor = self.last(halved) + x.sum()
        return result


def test_a_training_step_holds_the_local_variables_of_its_forward() -> None:
    module, x = Wide(), torch.ones(100, 4)
    graph = joint_capture(module, (x,), options=StepOptions()).graph
    counted = step_peak_bytes(module, (x,))
    assert _peak_bytes(graph) == counted.peak_bytes
    assert counted.phase == "forward"
    assert _peak_bytes(without_python(graph)) < counted.peak_bytes - 300_000
    assert graph.value_held.max() < graph.first_backward


class Unread(nn.Module):
    """Returns a large result beside the one that the loss reads."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.beside = nn.Linear(4, 4), nn.Linear(4, 2000)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.first(x)
        return hidden, self.beside(hidden).tanh()


def test_a_training_step_computes_results_that_the_loss_does_not_read() -> None:
    module, x = Unread(), torch.ones(100, 4)
    graph = joint_capture(module, (x,), options=StepOptions()).graph
    counted = step_peak_bytes(module, (x,))
    assert counted.phase == "forward"
    assert _peak_bytes(graph) == counted.peak_bytes
