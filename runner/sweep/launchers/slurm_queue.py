"""What Slurm still has of a sweep's jobs, by its own commands: they need no accounting database."""

import shutil
import subprocess
import time
from collections.abc import Collection

from fxpart.errors import SpecError
from runner.sweep.launchers.worker import GRACE_S

__all__ = ["cancel", "in_queue", "refuse_without_slurm"]

_COMMANDS = ("sbatch", "srun", "squeue", "scancel")
_ANSWER_S = 60.0
_LOOK_S = 0.5


def refuse_without_slurm() -> None:
    """Raise `SpecError` on a machine that has no commands of Slurm's."""
    missing = [name for name in _COMMANDS if shutil.which(name) is None]
    if missing:
        raise SpecError(
            f"there is no Slurm here (no {', '.join(missing)} on PATH); start the sweep on a"
            " machine of the cluster, or try it with hydra/launcher=submitit_local"
        )


def in_queue(job_ids: Collection[str]) -> list[str]:
    """Return those of `job_ids`, such as ``17_3``, that wait or run; all, if Slurm is silent."""
    arrays = dict.fromkeys(job_id.partition("_")[0] for job_id in job_ids)
    command = ["squeue", "--noheader", "--array", "--format=%i %A_%a", f"--jobs={','.join(arrays)}"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_ANSWER_S, check=False
        )
    except subprocess.TimeoutExpired:
        return list(job_ids)
    if done.returncode and "Invalid job id" not in done.stderr:
        return list(job_ids)  # a controller that restarts: the jobs go on meanwhile
    listed = done.stdout.split()
    return [job_id for job_id in job_ids if job_id in listed]


def cancel(job_ids: Collection[str]) -> None:
    """Have Slurm end the jobs, and wait a little until it has; they hear a SIGTERM first."""
    if not job_ids:
        return
    arrays = dict.fromkeys(job_id.partition("_")[0] for job_id in job_ids)
    subprocess.run(["scancel", *arrays], capture_output=True, timeout=_ANSWER_S, check=False)
    end_s = time.monotonic() + 2 * GRACE_S
    while time.monotonic() < end_s and in_queue(job_ids):
        time.sleep(_LOOK_S)  # Slurm tells nobody, it is asked
