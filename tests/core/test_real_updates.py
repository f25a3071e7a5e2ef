"""The predicted state and peak of an optimizer step, byte for byte against a real one."""

from functools import cache

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fxpart.capture.training.joint import joint_capture
from fxpart.core.graph import OpGraph
from fxpart.core.optimizer import IMPLEMENTATIONS, OPTIMIZERS, Optimizer, with_optimizer
from fxpart.cost.holding import live_bytes, weight_bytes_of
from fxpart.cost.tables import memory_tables
from tests.core.real_updates import real_updates

NAMES = OPTIMIZERS[1:]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Small(nn.Module):
    """Weights of different sizes; one is frozen, one is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(30, 12)
        self.wide = nn.Linear(12, 40)
        self.norm = nn.LayerNorm(40)
        self.narrow = nn.Linear(40, 12)
        self.frozen = nn.Linear(12, 12).requires_grad_(requires_grad=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.frozen(self.narrow(torch.relu(self.norm(self.wide(self.embed(ids))))))
        logits: Tensor = x @ self.embed.weight.T
        return logits


class Mixed(Small):
    """The same in bfloat16, except for two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.to(torch.bfloat16)
        self.wide.float()
        self.norm.float()

    def forward(self, ids: Tensor) -> Tensor:
        wide = torch.relu(self.norm(self.wide(self.embed(ids).float())))
        x = self.frozen(self.narrow(wide.to(torch.bfloat16)))
        logits: Tensor = x @ self.embed.weight.T
        return logits


def _module(kind: str) -> nn.Module:
    return Mixed() if kind == "mixed" else Small().to(DTYPES[kind])


@cache
def _captured(kind: str) -> OpGraph:
    module = _module(kind)
    return joint_capture(module, (torch.zeros(2, 5, dtype=torch.int64),)).graph


def _predicted_peak(graph: OpGraph) -> int:
    """Return the bytes of weights, state, gradients and update temporaries on one device."""
    tables = memory_tables(graph)
    live = live_bytes(tables, np.zeros(graph.n_ops, dtype=np.int64), 0)
    updates = np.flatnonzero(graph.is_update)
    # Besides the gradients, the inputs and the loss are live.
    inputs = int(graph.value_bytes[graph.value_producer < 0].sum())
    others = set(np.flatnonzero(graph.value_is_output)) - set(graph.gradient_values)
    loss = sum(
        int(graph.value_bytes[v]) for v in others if not graph.is_update[graph.value_producer[v]]
    )
    weights = weight_bytes_of(tables, np.arange(graph.n_ops))
    return weights + int(live[updates].max()) - inputs - loss


@pytest.mark.parametrize("kind", [*DTYPES, "mixed"])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", NAMES)
def test_state_and_peak_equal_those_of_a_real_step(
    name: str, implementation: str, kind: str
) -> None:
    optimizer = Optimizer(name, implementation=implementation)
    graph = with_optimizer(_captured(kind), optimizer)
    real = real_updates(_module(kind), optimizer)
    assert int(graph.weight_state_bytes.sum()) == real.state
    assert _predicted_peak(graph) == real.peak


@pytest.mark.parametrize("kind", ["bfloat16", "mixed"])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", NAMES)
def test_float32_copies_equal_those_of_a_real_step(
    name: str, implementation: str, kind: str
) -> None:
    optimizer = Optimizer(name, master_weights=True, implementation=implementation)
    graph = with_optimizer(_captured(kind), optimizer)
    real = real_updates(_module(kind), optimizer)
    assert int(graph.weight_state_bytes.sum()) == real.state
    assert _predicted_peak(graph) == real.peak
