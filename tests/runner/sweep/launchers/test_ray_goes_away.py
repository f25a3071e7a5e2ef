"""A process of Ray is killed during a sweep: Ray then ends the one connected to it."""

from collections import Counter
from pathlib import Path

import pytest

from tests.runner.command import HALVES, OWN, SMALL, run, tracked_runs

# A worker whose graph is known imports no torch, and calls no factory.
STRIKES = (
    HALVES
    + """
import os, signal, time
from pathlib import Path

def raylet(problem):
    _once(os.getppid())
    return first(problem)

def driver(problem):
    for path in Path("/proc").glob("[0-9]*"):
        if _is_ours(path):
            _once(int(path.name))
    return first(problem)

def _is_ours(path):
    try:
        words = (path / "cmdline").read_text()
        return "runner.sweep.launchers.ray_driver" in words and os.getcwd() == os.readlink(path /
        "cwd")
    except OSError:  # gone meanwhile, or of somebody else
        return False

def _once(process):
    if not Path("struck").exists():
        Path("struck").touch()
        os.kill(process, signal.SIGKILL)
        time.sleep(60)  # until Ray ends this process, too
"""
)


@pytest.mark.usefixtures("store")
@pytest.mark.parametrize("whom", ["raylet", "driver"])
def test_every_job_is_done_once_although_ray_ended(folder: Path, whom: str) -> None:
    pytest.importorskip("ray")
    (folder / "strikes.py").write_text(STRIKES)
    # Else the first worker would import torch, and capture the model.
    assert run(folder, *OWN, SMALL, "mode=kl_based", "tracking=none").code == 0
    functions = f"mode.function=strikes:first,strikes:{whom},strikes:last"
    # A job at a time: each worker has imports of its own.
    swept = ["-m", *OWN, SMALL, "hydra/launcher=ray", "hydra.launcher.init.num_cpus=1"]
    done = run(folder, *swept, "mode=custom", functions)
    assert done.code == 0, done.err
    assert (folder / "struck").exists()
    assert "3 runs" in done.out
    assert done.err.splitlines()[-1].startswith("3 of 3 jobs done")
    messages = [line for line in done.err.splitlines() if " jobs done" not in line]
    assert len(messages) == 1, done.err
    assert " of the jobs were lost: " in messages[0]
    runs = tracked_runs(folder, "tags.kind = 'run'")
    assert sorted(Counter(logged.data.tags["config_key"] for logged in runs).values()) == [1, 1, 1]
    (parent,) = tracked_runs(folder, "tags.kind = 'sweep'")
    assert parent.info.status == "FINISHED"
