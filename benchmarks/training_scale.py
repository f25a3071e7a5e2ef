"""``python -m benchmarks.training_scale``: check that training Llama-3-70B fits sixteen devices.

Runs the command as a user would, with an empty cache: capture of the training step, optimizer, cut,
and memory of each device. Prints its output with the time of each step, and the seconds and peak
resident memory of the process beside their targets.
"""

import argparse
import tempfile
from pathlib import Path

from benchmarks.process import run_python

TARGET_S, TARGET_GB = 300.0, 4.0
_STEP = (
    *("model=llama3_70b", "phase=training", "devices=16x80gb"),
    *("latency=roofline", "latency.compute_efficiency=0.7", "latency.bandwidth_efficiency=0.8"),
    "tracking=none",
)
MODES = ("size_based", "pipeline", "kl_based")


def main() -> None:
    """Print the output of the command for each mode, and its time and memory."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.training_scale", description=__doc__
    )
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("overrides", nargs="*", help="given first, such as checkpointing=block")
    chosen = parser.parse_args()
    for mode in chosen.modes:
        with tempfile.TemporaryDirectory() as folder:
            command = ["-m", "runner", *_STEP, f"mode={mode}", *chosen.overrides]
            measured = run_python(command, Path(folder))
        print(f"$ python {' '.join(command)}")
        print(measured.messages)
        print(measured.output.rstrip())
        print(
            f"{mode}: {measured.seconds:.1f} s in all (target {TARGET_S:g}),"
            f" {measured.peak_bytes / 1e9:.2f} GB (target {TARGET_GB:g})\n",
            flush=True,
        )


if __name__ == "__main__":
    main()
