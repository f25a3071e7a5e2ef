"""A model whose second stage gets into trouble while it runs, for tests of how that ends.

Stages travel as exported graphs, so the trouble is an operator. It must be known in the stage's
process too: `known_to_workers` has Python import this module there at its start. So it imports
little.
"""

import os
import signal
import time
from pathlib import Path

import torch
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parent.parent.parent
MARKS = "FXPART_TEST_MARKS"
"""Environment variable: the folder where a process that naps leaves a file called as its number."""
_CALLS = [0]


@torch.library.custom_op("fxpart_test::trouble", mutates_args=())
def trouble(x: Tensor, kind: str) -> Tensor:
    """Return a copy of `x`, three times; then get into trouble."""
    _CALLS[0] += 1
    # Of two microbatches: both to warm up, then the first of the first timed step.
    if _CALLS[0] > 3:
        _get_into(kind)
    return x.clone()


@trouble.register_fake
def _(x: Tensor, kind: str) -> Tensor:
    return torch.empty_like(x)


def _get_into(kind: str) -> None:
    if kind == "raise":
        raise ValueError("bucket 7 is\nnot there")
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "exit":
        os._exit(0)
    if MARKS in os.environ:
        (Path(os.environ[MARKS]) / str(os.getpid())).touch()
    # Far longer than any test waits: whoever naps is killed.
    time.sleep(600)


class Troubled(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.second(trouble(torch.tanh(self.first(x)), self.kind))
        return y


def run_into(kind: str, timeout_s: float) -> None:
    """Run the model on two stages until it gets into trouble."""
    from fxpart.execution.pipeline_run import run_pipeline
    from tests.execution.pipeline_scene import cut_chain

    inputs = [(torch.ones(2, 4),), (torch.ones(2, 4),)]
    run_pipeline(cut_chain(Troubled(kind), ("tanh",)), inputs, training=False, timeout_s=timeout_s)


def known_to_workers(folder: Path) -> dict[str, str]:
    """Return the environment in which Python imports this module first."""
    (folder / "sitecustomize.py").write_text("import tests.execution.trouble\n")
    return {"PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)])}
