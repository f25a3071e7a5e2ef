"""``python -m benchmarks.main_job``: the main job from a cold and a warm cache, and ``--help``.

Cold: no captured graph, no MLflow database; compiled loops are there, as the setup leaves them.
The starting Python, all imports, MLflow and every file written are in the time.
"""

import tempfile
from pathlib import Path

from benchmarks.process import Measured, run_python

MAIN_JOB = ["-m", "runner", "mode=kl_based", "devices=4x16gb"]
_REPEATS = 3


def main() -> None:
    """Print one line for each case: seconds (the median of three) and peak memory."""
    cold: list[Measured] = []
    warm: list[Measured] = []
    for _ in range(_REPEATS):
        with tempfile.TemporaryDirectory() as folder:
            cold.append(run_python(MAIN_JOB, Path(folder)))
            warm.append(run_python(MAIN_JOB, Path(folder)))
    with tempfile.TemporaryDirectory() as folder:
        helped = [run_python(["-m", "runner", "--help"], Path(folder)) for _ in range(_REPEATS)]
    print(f"{'case':<28} {'median s':>8} {'worst s':>8} {'peak GB':>8}")
    for name, runs in (("main job, cold", cold), ("main job, warm", warm), ("--help", helped)):
        times = sorted(run.seconds for run in runs)
        peak = max(run.peak_bytes for run in runs) / 1e9
        print(f"{name:<28} {times[len(times) // 2]:>8.2f} {times[-1]:>8.2f} {peak:>8.2f}")


if __name__ == "__main__":
    main()
