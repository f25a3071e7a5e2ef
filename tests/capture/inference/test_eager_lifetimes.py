"""Values live as long as Python keeps them: by hand, and as counted in real eager calls."""

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fxpart.capture.api import capture_graph
from fxpart.capture.inference.eager_lifetimes import (
    eager_graph,
    releases,
    watching_python,
    with_lifetimes,
)
from fxpart.capture.inference.export import export_program
from fxpart.capture.inference.from_export import op_graph
from fxpart.capture.models.build import build_model
from fxpart.core.graph import OpGraph
from fxpart.cost.evaluate import peak_bytes
from fxpart.cost.tables import memory_tables
from fxpart.errors import CaptureError
from fxpart.execution.real_step import forward_peak_bytes
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
    """The same, and each result takes the place of the last."""

    def forward(self, x: Tensor) -> Tensor:
        x = x + 1
        x = x * 2
        return x.neg().exp()


class Calls(nn.Module):
    """What it gives to a module is kept by the call, though it lets go of it itself."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Rebound()

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.inner(x.cos())
        return result


def _held(module: nn.Module) -> dict[str, str]:
    """Return value to the operator after which Python lets go of it."""
    with watching_python():
        program = export_program(module, (torch.ones(4, device="meta"),))
    graph = op_graph(program)
    last = releases(program, graph)
    return {
        name: graph.names[op] for name, op in zip(graph.value_names, last, strict=True) if op >= 0
    }


def test_a_local_variable_lives_until_its_function_returns() -> None:
    assert _held(Local()) == {"add": "exp", "mul": "exp", "neg": "exp", "exp": "exp"}
    assert _held(Rebound()) == {"add": "mul", "mul": "exp", "neg": "exp", "exp": "exp"}


def test_an_argument_lives_until_the_call_returns() -> None:
    assert _held(Calls())["cos"] == "exp"


@pytest.mark.parametrize("module", [Local(), Rebound(), Calls()])
def test_a_peak_is_that_of_a_real_call(module: nn.Module) -> None:
    x = torch.ones(1000)
    assert _peak_bytes(eager_graph(module, (x,))) == forward_peak_bytes(module, (x,))


def test_the_graph_alone_would_say_less() -> None:
    x = torch.ones(1000)
    assert _peak_bytes(capture_graph(Local(), (x,))) == 3 * 4000
    assert _peak_bytes(eager_graph(Local(), (x,))) == 5 * 4000


@pytest.mark.parametrize("name", ["gpt2", "dlrm", "resnet50", "vit_large", "mixtral_8x7b"])
def test_published_architectures_are_within_two_percent_of_a_real_call(name: str) -> None:
    spec = SMALL_PRESETS[name]
    planned, real = build_model(spec), build_model(spec, torch.device("cpu"))
    graph = eager_graph(planned.module, planned.args, planned.kwargs)
    counted = forward_peak_bytes(real.module, real.args, real.kwargs)
    assert abs(_peak_bytes(graph) / counted - 1) < 0.02


def test_operators_are_those_of_a_plain_capture() -> None:
    spec = SMALL_PRESETS["gpt2"]
    built = build_model(spec)
    plain = capture_graph(built.module, built.args, built.kwargs)
    eager = eager_graph(built.module, built.args, built.kwargs)
    assert eager.names == plain.names
    assert np.array_equal(eager.value_alloc_bytes, plain.value_alloc_bytes)
    assert np.array_equal(eager.moved_bytes, plain.moved_bytes)
    for op in range(plain.n_ops):
        assert {*plain.reads_of(op).tolist()} <= {*eager.reads_of(op).tolist()}
    assert _peak_bytes(eager) > _peak_bytes(plain)


def test_values_that_end_nowhere_or_at_once_are_read_by_nobody_else() -> None:
    graph = capture_graph(Local(), (torch.ones(4),))
    producers = graph.value_producer
    for last in (np.full(graph.n_values, -1), producers):
        assert np.array_equal(with_lifetimes(graph, last).reads, graph.reads)


def test_a_model_that_cannot_be_captured_is_refused() -> None:
    class Branches(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.cos() if x.sum() > 0 else x

    with pytest.raises(CaptureError, match="branches on the values of a tensor"):
        eager_graph(Branches(), (torch.ones(4),))
