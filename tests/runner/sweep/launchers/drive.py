"""``python -m tests.runner.sweep.launchers.drive LAUNCHER SETTINGS TASK COUNT``: jobs without a
model.

Runs them as a sweep does, in the working directory, and prints as JSON how each ended.
"""

import copy
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hydra._internal.callbacks import Callbacks
from hydra.conf import HydraConf
from hydra.types import HydraContext
from omegaconf import DictConfig, OmegaConf

from runner.cli.ending import reported
from runner.plugins.hydra_plugins.fxpart_plugins import (
    JoblibLauncher,
    LocalLauncher,
    RayLauncher,
    SlurmLauncher,
    SpreadLauncher,
)

LAUNCHERS: dict[str, type[SpreadLauncher]] = {
    "joblib": JoblibLauncher,
    "ray": RayLauncher,
    "submitit_local": LocalLauncher,
    "submitit_slurm": SlurmLauncher,
}


class OneNumber:
    """Replace Hydra's composition: a job is its number."""

    def load_sweep_config(self, master: DictConfig, overrides: Sequence[str]) -> DictConfig:
        number = int(overrides[0].partition("=")[2])
        return DictConfig({"number": number, "hydra": copy.deepcopy(master.hydra)})


def _master(folder: Path) -> DictConfig:
    hydra = OmegaConf.structured(HydraConf)
    hydra.job.name, hydra.job.chdir = "drive", False
    hydra.sweep.dir, hydra.sweep.subdir = str(folder / "swept"), "${hydra.job.num}"
    hydra.output_subdir, hydra.job_logging = None, {"root": None}
    return DictConfig({"hydra": hydra})


def mixed(config: DictConfig) -> dict[str, object]:
    """Return where the job runs; job 1 has a bug and job 3 is killed."""
    if config.number == 1:
        raise ZeroDivisionError("a bug")
    if config.number == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return {
        "square": config.number**2,
        "process": os.getpid(),
        "folder": str(Path.cwd()),
        "threads": os.environ.get("OMP_NUM_THREADS"),
    }


def endless(config: DictConfig) -> None:
    """Report that the job has begun, and when it is interrupted."""
    # Renamed when complete: whoever waits for the file reads it as soon as it exists.
    begun = Path(f"begun_{config.number}")
    begun.with_suffix(".tmp").write_text(str(os.getpid()))
    try:
        begun.with_suffix(".tmp").rename(begun)  # an interrupt may follow at once
        for _ in range(6000):  # longer than any test waits: it must be interrupted
            time.sleep(0.05)  # Ray's interrupt does not end a sleep
    except KeyboardInterrupt:
        Path(f"interrupted_{config.number}").touch()
        raise


TASKS: dict[str, Callable[[DictConfig], object]] = {"mixed": mixed, "endless": endless}


def main() -> int:
    kind, settings, task, count = sys.argv[1:]
    launcher = LAUNCHERS[kind](**json.loads(settings))
    loader: Any = OneNumber()
    launcher.setup(
        hydra_context=HydraContext(config_loader=loader, callbacks=Callbacks()),
        task_function=TASKS[task],
        config=_master(Path.cwd()),
    )
    ends = launcher.launch([[f"number={number}"] for number in range(int(count))], 0)
    assert all(end.cfg is None and end.hydra_cfg is None for end in ends)
    shown = [[end.status.name if end.status else None, end._return_value] for end in ends]
    sys.stdout.write(json.dumps(shown, default=str))
    return 0


if __name__ == "__main__":
    sys.exit(reported(main))
