"""A model whose second stage fails at run time, for a test of how that ends.

Stages are sent as exported graphs, so an operator fails. It must also be known in the process of
the stage: `known_to_workers` makes Python import this module there at its start. So it imports
little.
"""

import os
from pathlib import Path

import torch
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parent.parent.parent
_CALLS = [0]


@torch.library.custom_op("fxpart_test::trouble", mutates_args=())
def trouble(x: Tensor) -> Tensor:
    """Return a copy of `x`, three times; then fail."""
    _CALLS[0] += 1
    # With two microbatches: both for the warm-up, then the first of the first timed step.
    if _CALLS[0] > 3:
        raise ValueError("bucket 7 is\nnot there")
    return x.clone()


@trouble.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


class Troubled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.second(trouble(torch.tanh(self.first(x))))
        return y


def known_to_workers(folder: Path) -> dict[str, str]:
    """Return the environment in which Python imports this module first."""
    (folder / "sitecustomize.py").write_text("import tests.execution.trouble\n")
    return {"PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)])}
