"""``python -m benchmarks.launchers``: one sweep in process, and by every launcher on two cores.

24 jobs with a captured gpt2; each launcher has its own folder, database and process. All metrics of
every job except times are compared with those in process. ``start s`` is the time until the first
job begins, ``job s`` the remaining time per job. Slurm is a real single-node cluster started for
this; it is skipped if not installed.
"""

import argparse
import os
import shutil
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from benchmarks.logged_runs import logged_runs
from benchmarks.process import run_python
from benchmarks.slurm_here import NoSlurmError, slurm_here
from benchmarks.text_table import table

_MODEL = "model=gpt2"
_MODES = "mode=size_based,kl_based,cost_aware"
_DEVICES = "devices=2x16gb,4x16gb"
_RATES = ("pcie3", "pcie4", "pcie5", "nvlink4")
_LAUNCHERS = {
    "in process": (),
    "joblib": ("hydra/launcher=joblib", "hydra.launcher.n_jobs=2"),
    "ray": ("hydra/launcher=ray", "hydra.launcher.init.num_cpus=2"),
    "submitit_local": ("hydra/launcher=submitit_local", "hydra.launcher.array_parallelism=2"),
    "submitit_slurm": ("hydra/launcher=submitit_slurm", "hydra.launcher.array_parallelism=2"),
}
_TIMES = ("capture_s", "partition_s")
"""Metrics that differ between two runs of the same job."""

Numbers = dict[str, dict[str, float]]
"""Metrics by name of the job."""


@dataclass(frozen=True, slots=True)
class Sweep:
    """The times of a sweep, and the metrics of its jobs."""

    seconds: float
    start_s: float
    jobs: Numbers

    @property
    def job_s(self) -> float:
        """Seconds per job without start-up."""
        return (self.seconds - self.start_s) / len(self.jobs)


def main() -> None:
    """Print one line for each launcher; exit if any number differs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rates", type=int, default=len(_RATES), help="at most 4: 6 jobs each")
    parser.add_argument("--only", nargs="+", choices=_LAUNCHERS, default=list(_LAUNCHERS))
    options = parser.parse_args()
    swept = [_MODEL, _MODES, _DEVICES, f"transfer_rate={','.join(_RATES[: options.rates])}"]
    rows = []
    with tempfile.TemporaryDirectory() as place, ExitStack() as stack:
        captured = Path(place) / "captured"
        captured.mkdir()
        run_python(["-m", "runner", _MODEL, "mode=single", "tracking=none"], captured)
        first: Sweep | None = None
        for name in options.only:
            if name == "submitit_slurm" and not _has_slurm(stack):
                continue
            sweep = _run([*swept, *_LAUNCHERS[name]], captured, Path(place) / name)
            first = first or sweep
            rows.append(_row(name, sweep, first))
    print(f"{len(first.jobs) if first else 0} jobs, {os.cpu_count()} cores")
    print(table(("launcher", "seconds", "start s", "job s", "numbers"), rows))


def _has_slurm(stack: ExitStack) -> bool:
    folder = stack.enter_context(tempfile.TemporaryDirectory())
    try:
        os.environ.update(stack.enter_context(slurm_here(Path(folder))))
    except NoSlurmError as error:
        print(f"submitit_slurm left out: {error}")
        return False
    return True


def _run(overrides: Sequence[str], captured: Path, folder: Path) -> Sweep:
    folder.mkdir()
    shutil.copytree(captured / "cache", folder / "cache")
    process = run_python(["-m", "runner", "-m", *overrides], folder)
    logged = logged_runs(folder / "outputs" / "mlflow.db")
    runs = [run for run in logged if run.data.tags.get("kind") == "run"]
    (parent,) = (run for run in logged if run.data.tags.get("kind") == "sweep")
    begin_ms = parent.info.start_time
    first_ms = min(run.info.start_time for run in runs)
    last_ms = max(run.info.end_time for run in logged)
    jobs: Numbers = {
        run.info.run_name: {
            key: value for key, value in run.data.metrics.items() if key not in _TIMES
        }
        for run in runs
    }
    # The time before the parent run and after its end counts as start-up too.
    outside_s = process.seconds - (last_ms - begin_ms) / 1e3
    return Sweep(process.seconds, outside_s + (first_ms - begin_ms) / 1e3, jobs)


def _row(name: str, sweep: Sweep, first: Sweep) -> tuple[str, ...]:
    if sweep.jobs != first.jobs:
        differ = [job for job in first.jobs if sweep.jobs.get(job) != first.jobs[job]]
        raise SystemExit(f"{name}: {len(differ)} jobs differ, such as {differ[:3]}")
    count = sum(len(metrics) for metrics in sweep.jobs.values())
    equal = f"{count} equal"
    return name, f"{sweep.seconds:.1f}", f"{sweep.start_s:.1f}", f"{sweep.job_s:.2f}", equal


if __name__ == "__main__":
    main()
