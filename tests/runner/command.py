"""The command as a user runs it: real processes, a real MLflow store, a user's own model."""

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.fork_server import fork_command

MODEL = """
import os
import signal
import time
from pathlib import Path
import torch
from torch import nn

def build(batch_size, dtype, width=64, layers=6):
    blocks = [nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(layers)]
    return nn.Sequential(*blocks).to(dtype), (torch.zeros(batch_size, width, dtype=dtype),)

def nested(batch_size, dtype):
    model, inputs = build(batch_size, dtype)
    return nn.Sequential(model), inputs

def broken(batch_size, dtype):
    class Broken(nn.Module):
        def forward(self, x):
            return x + 1 if x.sum() > 0 else x
    return Broken(), (torch.zeros(batch_size),)

def grouped(batch_size, dtype, group=0):
    return build(batch_size, dtype)

def _once(number):
    if not Path("struck").exists():
        Path("struck").touch()
        os.kill(os.getpid(), number)
        time.sleep(60)  # until the signal is heard

def is_killed(batch_size, dtype):
    _once(signal.SIGKILL)
    return build(batch_size, dtype, width=32)

def is_interrupted(batch_size, dtype):
    _once(signal.SIGINT)
    return build(batch_size, dtype, width=32)

def spoils_the_store(batch_size, dtype):
    for path in Path("outputs").glob("mlflow.db-*"):
        path.unlink()
    Path("outputs/mlflow.db").write_bytes(b"broken " * 10_000)
    return build(batch_size, dtype)
"""
# Modes of a user's own, for `SMALL`; their module imports no torch, which takes seconds.
HALVES = """
def first(problem):
    return [2 * op // problem.graph.n_ops for op in range(problem.graph.n_ops)]

def last(problem):
    return [1 - device for device in first(problem)]
"""
# Tiny devices have no room for a driver context.
OWN = ["model=custom", "model.factory=tiny:build", "model.name=tiny", "reserve=none"]
# A layer holds 64 x 64 + 64 floats = 16,640 bytes, six layers 99,840; so 0.06 MB holds three.
SMALL = "devices=2x0.06mb"
COMMAND = ("-m", "runner")


@dataclass(frozen=True)
class Done:
    code: int
    out: str
    err: str

    @property
    def error(self) -> str:
        """The only line printed for a mistake."""
        lines = [line for line in self.err.splitlines() if line.startswith("error: ")]
        assert len(lines) == 1, self.err
        assert "Traceback" not in self.err
        assert "Warning" not in self.err
        return lines[0].removeprefix("error: ")


def run(
    folder: Path, *arguments: str, program: tuple[str, str] = COMMAND, bare: bool = False
) -> Done:
    """Run the command, or the Python code `program`, in a process of its own in `folder`.

    Its imports come from `benchmarks.fork_server`, unless the process is to be `bare`.
    """
    if not bare:
        return Done(*fork_command(folder, program, arguments, 300))
    done = subprocess.run(
        [sys.executable, *program, *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    return Done(done.returncode, done.stdout, done.stderr)


def tracked_runs(folder: Path, filter_string: str = "") -> list[Any]:
    """Return the runs in the store of `folder`."""
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{folder / 'outputs' / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("fxpart")
    assert experiment is not None
    return list(client.search_runs([experiment.experiment_id], filter_string))
