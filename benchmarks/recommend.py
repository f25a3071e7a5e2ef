"""Time recommendations, and check that the files of the best plan agree with it.

    python -m benchmarks.recommend [--models NAME ...] [--devices NAME ...] [--training]
                                   [--limit-s 900] [--cache FOLDER] [-- OVERRIDE ...]

Cells are models on devices, one after the other, each command in its own process with a limit of
CPU seconds. A command that captured graphs runs a second time: ``CPU s`` is with cached graphs,
``s`` the wall-clock time. ``--training`` plans a training step if one fits, else a forward pass.
The best plan is then run by itself: its throughput must be the same, and the engine files in its
folder must have its devices, layers and examples.
"""

import argparse
import json
import os
import resource
import shlex
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.recommend_files import Expected, file_faults

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
"""A user's own file in ``conf/devices``, modelled on the shipped ``2x_dgx_h100``."""
DEVICES = (
    *(f"{count}x80gb" for count in (1, 2, 4, 8)),
    "4x16gb",
    "2x_dgx_h100",
    "2x80gb+4x24gb",
    "16x_dgx_h100",
)
_HEADINGS = "| model | devices | CPU s | s | costed | best | files |\n" + "| --- " * 7 + "|\n"


@dataclass(frozen=True, slots=True)
class _Outcome:
    """The outcome of a finished command."""

    code: int
    error: str
    """Its last line on stderr."""
    cpu_s: float
    clock_s: float


def _run(arguments: list[str], folder: str, limit_s: int) -> _Outcome:
    """Run ``python -m`` with `arguments` in `folder`, for at most `limit_s` of CPU time."""
    begin_s, before = time.monotonic(), os.times()
    process = subprocess.run(
        [sys.executable, "-m", *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=partial(resource.setrlimit, resource.RLIMIT_CPU, (limit_s, limit_s)),
    )
    after, clock_s = os.times(), time.monotonic() - begin_s
    cpu_s = after.children_user + after.children_system
    cpu_s -= before.children_user + before.children_system
    lines = process.stderr.strip().splitlines() or [""]
    error = lines[-1] if process.returncode >= 0 else f"stopped after {limit_s} s of CPU"
    return _Outcome(process.returncode, error, cpu_s, clock_s)


def row(
    model: str, devices: str, overrides: list[str], cache: Path, limit_s: int
) -> tuple[str, bool]:
    """Return the table row of a cell, and whether a plan fits."""
    with tempfile.TemporaryDirectory() as folder:
        device_file = Path(folder, "conf", "devices", "16x_dgx_h100.yaml")
        device_file.parent.mkdir(parents=True)
        device_file.write_text(_SIXTEEN)
        common = ["tracking=none", f"capture.cache_dir={cache}"]
        command = [f"model={model}", f"devices={devices}", *overrides, *common]
        command.append(f"hydra.run.dir={folder}/out")
        before = set(cache.glob("*.npz"))
        outcome = _run(["runner.recommend", *command], folder, limit_s)
        cold_text = ""
        if set(cache.glob("*.npz")) - before and outcome.code >= 0:
            cold_text = f" ({outcome.cpu_s:.0f} cold)"
            outcome = _run(["runner.recommend", *command], folder, limit_s)
        times = (
            f"| `{model}` | {devices} | {outcome.cpu_s:.1f}{cold_text} | {outcome.clock_s:.0f} |"
        )
        if outcome.code:
            reason = outcome.error.partition(";")[0]
            return f"{times} | {reason} | |", " fits" not in reason
        document = json.loads(Path(folder, "out", "recommend.json").read_text())
        best = document["plans"][0]
        best_command = [*shlex.split(best["command"])[2:], *common, f"hydra.run.dir={folder}/best"]
        files = _files(_run(best_command, folder, limit_s), best, Path(folder, "best"))
    total = len(document["plans"]) + len(document["unfit"])
    counts = f"{total} of {total + len(document['bounded'])}"
    rate = f"{best['metrics']['examples_per_s']:,.1f}"
    answer = f"{rate} examples/s on {best['devices_used']}: `{' '.join(best['overrides'])}`"
    return f"{times} {counts} | {answer} | {files} |", True


def _files(outcome: _Outcome, best: dict[str, Any], folder: Path) -> str:
    """Return the engine files written by the `best` plan run by itself, and their faults."""
    if outcome.code:
        return f"wrong: {outcome.error}"
    result = json.loads((folder / "result.json").read_text())
    rate, stated = (run["metrics"]["examples_per_s"] for run in (result, best))
    if rate != stated:
        return f"wrong: {rate} examples/s alone, {stated} recommended"
    expected = Expected(
        devices=best["devices_used"],
        examples=best["batch"] * best["data_parallel"] * best["microbatches"],
        model=result["config"]["resolved"]["model"]["config"],
    )
    faults = file_faults(folder, expected)
    entries = [f"{name} ({', '.join(wrong)})" if wrong else name for name, wrong in faults.items()]
    prefix = "wrong: " if any(faults.values()) else ""
    return prefix + (", ".join(entries) or "none")


def main() -> None:
    """Print a row for each cell."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="*", default=MODELS)
    parser.add_argument("--devices", nargs="*", default=DEVICES, choices=DEVICES)
    parser.add_argument("--training", action="store_true")
    parser.add_argument("--limit-s", type=int, default=900)
    parser.add_argument("--cache", type=Path, default=Path.home() / ".cache" / "fxpart")
    parser.add_argument("overrides", nargs="*")
    chosen = parser.parse_args()
    sys.stdout.write(_HEADINGS)
    phases = [["phase=training"]] if chosen.training else []
    for model in chosen.models:
        for devices in chosen.devices:
            for phase in (*phases, []):
                overrides = [*phase, *chosen.overrides]
                text, fits = row(model, devices, overrides, chosen.cache, chosen.limit_s)
                sys.stdout.write(f"{text}\n")
                sys.stdout.flush()
                if fits:
                    break


if __name__ == "__main__":
    main()
