"""Small models cut into stages, and their microbatches, for real pipeline runs."""

import torch
from torch import Tensor, fx, nn

from fxpart.execution.stages.chain import Chain, chain_stages
from fxpart.torch_compat.split_module import split_module

WIDTH = 8
WORDS = 13


class Skips(nn.Module):
    """Everything that is difficult to pass to the next stage, and a weight in two of three.

    Passed are a value that only the last stage needs, a transposed one that the second stage writes
    to, a mask, a number without a batch dimension, and indices of a table, which must not be looked
    up before they have arrived.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.third = nn.Linear(WIDTH, WORDS, bias=False)
        self.third.weight = self.embed.weight
        self.second.bias.requires_grad_(False)
        self.of_word = nn.Parameter(torch.linspace(-1.0, 1.0, WORDS))
        self.register_buffer("shift", torch.linspace(0.0, 1.0, WIDTH))

    def forward(self, ids: Tensor, mask: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        places = ids.flip(1)
        skip = self.embed(ids)
        x = torch.relu_(self.first(skip).transpose(1, 2))
        y = self.second(x.transpose(1, 2)) * mask.unsqueeze(-1)
        z = self.third(y + skip * scale + self.shift)
        return z * self.of_word[places].unsqueeze(-1), mask


SKIPS_CUTS = ("transpose", "mul")
"""The nodes after which `Skips` is cut into three stages."""


def cut_chain(model: nn.Module, cuts: tuple[str, ...]) -> Chain:
    """Return the traced model cut into stages, each ending with a node named in `cuts`."""
    traced = fx.symbolic_trace(model)
    stage_of, stage = {}, 0
    for node in traced.graph.nodes:
        stage_of[node.name] = stage
        stage += node.name in cuts
    assert stage == len(cuts)
    return chain_stages(split_module(traced, model, lambda node: stage_of[node.name]))


def skips() -> Chain:
    """Return `Skips` with seeded weights, in three stages."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return cut_chain(Skips(), SKIPS_CUTS)


def skips_inputs(count: int, batch: int = 2, length: int = 5) -> list[tuple[Tensor, ...]]:
    """Return seeded inputs of `Skips` for `count` microbatches."""
    chance = torch.Generator().manual_seed(2)
    return [
        (
            torch.randint(0, WORDS, (batch, length), generator=chance),
            torch.rand((batch, length), generator=chance) < 0.7,
            torch.rand((), generator=chance),
        )
        for _ in range(count)
    ]
