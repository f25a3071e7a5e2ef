"""Captured modules that write in place: any placement of their groups can be carried out."""

import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from fxpart.capture.api import capture
from fxpart.execution.split.placement import split_by_assignment
from tests.execution.scene import at_random, same_bits

# Results, copies, views and writes of square matrices.
_STEPS: tuple[Callable[[Tensor, Tensor], Tensor], ...] = (
    lambda a, b: a.sin() + b,
    lambda a, _: a.relu(),
    lambda a, _: a.t(),
    lambda a, _: a.reshape(4, 4),
    lambda a, _: a.t().reshape(4, 4),
    lambda a, b: a.type_as(b),
    lambda a, _: a.t().contiguous(),
    lambda a, _: a.double().float(),
    lambda a, b: a.to(b),
    lambda a, _: functional.dropout(a, training=False),
    lambda a, _: a.add_(0.5),
    lambda a, _: a[1:].mul_(1.5),
    lambda a, b: a[0].copy_(b.sum(0)),
)


class _Writes(nn.Module):
    """Steps in random order, the same in each call."""

    def __init__(self, seed: int, count: int) -> None:
        super().__init__()
        self._seed, self._count = seed, count

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        rng = random.Random(self._seed)
        matrices = [x * 1.0]
        for _ in range(self._count):
            made = rng.choice(_STEPS)(rng.choice(matrices), rng.choice(matrices))
            matrices += [made] if made.shape == x.shape else []
        return (*[matrix for matrix in matrices if rng.random() < 0.3], matrices[-1] * 2)


@pytest.mark.parametrize("seed", range(24))
def test_no_placement_is_refused_or_changes_the_results(seed: int) -> None:
    module, x = _Writes(seed, count=14), torch.randn(4, 4)
    captured = capture(module, (x,))
    expected = module(x)
    for placement in range(3):
        placed = at_random(captured.graph, 3, placement)
        split = split_by_assignment(captured.graph_module, captured.graph, placed)
        assert same_bits(split(x), expected)
