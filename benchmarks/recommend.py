"""How long a recommendation takes from cached graphs, and what it says: models on devices.

    python -m benchmarks.recommend [--models NAME ...] [--devices NAME ...] [-- OVERRIDE ...]

Each pair is one command of its own; the first for a model captures its graphs, which takes minutes:
run it twice. Times are those of the processor, beside which a busy machine shows others on a clock.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

MODELS = ("gpt2_xl", "vit_large", "llama3_1_8b", "mixtral_8x7b", "llama3_70b")
_SIXTEEN = f"""\
defaults:
  - {"+".join(["8xh100"] * 16)}
  - override /transfer_rate@_global_.transfer_rate: nvlink4
  - _self_
spec: 16x_dgx_h100
nodes: [{", ".join(map(str, range(16)))}]
between_nodes: {{name: infiniband_ndr, bytes_per_s: 50e9, latency_s: 5e-6}}
"""
"""As the shipped ``2x_dgx_h100``: a file of the user's own, in ``conf/devices``."""
DEVICES = (
    *(f"{count}x80gb" for count in (1, 2, 4, 8)),
    "4x16gb",
    "2x_dgx_h100",
    "2x80gb+4x24gb",
    "16x_dgx_h100",
)


def row(model: str, devices: str, overrides: list[str]) -> str:
    """Recommend in a process of its own; return its row of the table."""
    with tempfile.TemporaryDirectory() as folder:
        own = Path(folder, "conf", "devices", "16x_dgx_h100.yaml")
        own.parent.mkdir(parents=True)
        own.write_text(_SIXTEEN)
        command = [sys.executable, "-m", "runner.recommend", f"model={model}", f"devices={devices}"]
        command += ["tracking=none", f"hydra.run.dir={folder}/out", *overrides]
        begin_s, before = time.monotonic(), os.times()
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        after, seconds = os.times(), time.monotonic() - begin_s
        cpu_s = after.children_user + after.children_system
        cpu_s -= before.children_user + before.children_system
        times = f"| `{model}` | {devices} | {cpu_s:.1f} | {seconds:.0f} |"
        if done.returncode:
            return f"{times} | | {done.stderr.strip().splitlines()[-1].partition(';')[0]} |"
        document = json.loads(Path(folder, "out", "recommend.json").read_text())
    best, bounded = document["plans"][0], len(document["bounded"])
    costed = len(document["plans"]) + len(document["unfit"])
    rate = f"{best['metrics']['examples_per_s']:,.1f}"
    answer = f"{rate} examples/s on {best['devices_used']}: `{' '.join(best['overrides'])}`"
    return f"{times} {costed} of {costed + bounded} | {answer} |"


def main() -> None:
    """Print a row for each pair."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="*", default=MODELS)
    parser.add_argument("--devices", nargs="*", default=DEVICES, choices=DEVICES)
    parser.add_argument("overrides", nargs="*")
    chosen = parser.parse_args()
    sys.stdout.write("| model | devices | CPU s | s | costed | best |\n" + "| --- " * 6 + "|\n")
    for model in chosen.models:
        for devices in chosen.devices:
            sys.stdout.write(f"{row(model, devices, chosen.overrides)}\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
