"""``python -m benchmarks.sweep_scale``: sweeps of 10, 100 and 1,000 jobs over a cached model.

Each in a fresh process with a fresh MLflow database. ``beside`` is the full cost of a job without
its partitioning: start-up and imports, composition, files, figures, MLflow, report. ``--model``
selects another model than gpt2.
"""

import argparse
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.logged_runs import logged_runs
from benchmarks.process import run_python
from benchmarks.text_table import table

_LINKS = ("pcie3", "pcie4", "pcie5", "nvlink3", "nvlink4", "ethernet_100g", "infiniband_ndr")
_RATES = (*_LINKS, "8gb", "20gb", "100gb")
_DEVICES = tuple(f"{count}x{gb}gb" for count in (1, 2, 4, 6, 8) for gb in (16, 24, 40, 80))
_MODES = ("single", "size_based", "pipeline", "kl_based", "cost_aware")
_SIZES = {10: (5, 2, 1), 100: (5, 4, 5), 1000: (5, 20, 10)}
"""Number of modes, devices and rates by number of jobs."""


@dataclass(frozen=True, slots=True)
class Sweep:
    """The time and memory of a sweep."""

    jobs: int
    seconds: float
    partition_s: float
    """Time of the modes alone."""
    peak_bytes: int

    @property
    def overhead_ms(self) -> float:
        """Time per job without the modes."""
        return (self.seconds - self.partition_s) / self.jobs * 1e3


def _overrides(jobs: int) -> list[str]:
    modes, devices, rates = _SIZES[jobs]
    return [
        f"mode={','.join(_MODES[:modes])}",
        f"devices={','.join(_DEVICES[:devices])}",
        f"transfer_rate={','.join(_RATES[:rates])}",
    ]


def _run(jobs: int, model: str, folder: Path) -> Sweep:
    measured = run_python(["-m", "runner", "-m", f"model={model}", *_overrides(jobs)], folder)
    runs = logged_runs(folder / "outputs" / "mlflow.db")
    partition_s = [
        run.data.metrics["partition_s"] for run in runs if "partition_s" in run.data.metrics
    ]
    if len(partition_s) != jobs:
        raise SystemExit(
            f"{len(partition_s)} of {jobs} jobs were logged:\n{measured.output}{measured.messages}"
        )
    return Sweep(jobs, measured.seconds, sum(partition_s), measured.peak_bytes)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a line for each size, and the cost of an additional job."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="gpt2")
    parser.add_argument("--jobs", type=int, choices=list(_SIZES), action="append")
    options = parser.parse_args(arguments)
    sweeps = []
    for jobs in options.jobs or _SIZES:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            # Capture the graph beforehand.
            run_python(["-m", "runner", f"model={options.model}", "tracking=none"], folder)
            sweeps.append(_run(jobs, options.model, folder))
    rows = [
        [
            f"{sweep.jobs:,}",
            f"{sweep.seconds:.1f}",
            f"{sweep.partition_s:.1f}",
            f"{sweep.overhead_ms:.1f}",
            f"{sweep.peak_bytes / 1e6:.0f}",
        ]
        for sweep in sweeps
    ]
    print(table(["jobs", "s in all", "s in modes", "ms beside, a job", "peak MB"], rows))
    small, large = sweeps[0], sweeps[-1]
    if large.jobs > small.jobs:
        added_s = large.seconds - large.partition_s - small.seconds + small.partition_s
        added_ms = added_s / (large.jobs - small.jobs) * 1e3
        print(
            f"each job more, from {small.jobs} to {large.jobs:,}: {added_ms:.1f} ms beside its mode"
        )


if __name__ == "__main__":
    main()
