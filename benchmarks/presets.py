"""``python -m benchmarks.presets [name ...]``: every preset captured and placed on a laptop.

With ``--topologies [--steps 16]`` on six topologies instead, by every mode and peer, for latency
and throughput (`benchmarks.preset_topologies`); the exit code is 1 if one beats `mode=optimal`.
``--objectives memory energy`` selects other objectives, ``--places equal "with a CPU"`` topologies.

For each model: operators, seconds to build and capture it without a cache, peak memory of that
process; then three modes on devices of 16, 24 or 80 GB that hold the model with memory to spare.
``less`` is the reduction of latency relative to size_based, ``gap`` the distance to a bound that no
placement can beat.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.preset_topologies import print_topologies
from benchmarks.process import run_python
from fxpart.cost.problem import BY_TIME, OBJECTIVES

DEVICES = {
    "gpt2": "4x16gb",
    "gpt2_xl": "4x16gb",
    "bert_large": "4x16gb",
    "t5_large": "4x16gb",
    "vit_large": "4x16gb",
    "resnet50": "4x16gb",
    "whisper_small": "4x16gb",
    "llama2_7b": "4x16gb",
    "llama2_13b": "4x16gb",
    "dlrm": "8x24gb",
    "mixtral_8x7b": "4x80gb",
    "llama3_70b": "4x80gb",
}


def _run(folder: Path, model: str, mode: str) -> tuple[dict[str, Any], int]:
    out = folder / mode
    measured = run_python(
        [
            "-m",
            "runner",
            f"model={model}",
            f"mode={mode}",
            f"devices={DEVICES[model]}",
            # Also for devices with curves and shares: the same latency model for all rows.
            *("latency=roofline", "latency.compute_efficiency=0.7"),
            "latency.bandwidth_efficiency=0.8",
            "tracking=none",
            f"capture.cache_dir={folder / 'cache'}",
            f"hydra.run.dir={out}",
        ],
        folder,
    )
    return json.loads((out / "result.json").read_text()), measured.peak_bytes


HEAD = (
    f"{'model':<14} {'devices':<8} {'operators':>9} {'weights GB':>10} {'capture s':>9}"
    f" {'peak GB':>7} | {'size_based ms':>13} {'gap':>6}"
    f" | {'kl_based ms':>11} {'s':>5} {'less':>6} {'gap':>6}"
    f" | {'cost_aware ms':>13} {'s':>5} {'less':>6} {'gap':>6}"
)


def _search_columns(metrics: dict[str, float], by_size: dict[str, float], width: int) -> str:
    less = 1 - metrics["latency_ms"] / by_size["latency_ms"]
    return (
        f" | {metrics['latency_ms']:>{width}.3f} {metrics['partition_s']:>5.2f} {less:>6.2%}"
        f" {metrics['optimality_gap_pct']:>5.1f}%"
    )


def main() -> None:
    """Print one row for each preset."""
    parser = argparse.ArgumentParser(prog="benchmarks.presets", description=__doc__)
    parser.add_argument("names", nargs="*", default=list(DEVICES))
    parser.add_argument("--topologies", action="store_true")
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--objectives", nargs="+", choices=OBJECTIVES, default=list(BY_TIME))
    parser.add_argument("--places", nargs="+", default=[], metavar="TOPOLOGY")
    arguments = parser.parse_args()
    chosen = arguments.names
    if arguments.topologies:
        selection = arguments.objectives, arguments.places
        sys.exit(not print_topologies(chosen, arguments.steps, *selection))
    print(HEAD)
    for model in chosen:
        with tempfile.TemporaryDirectory() as folder:
            first, peak = _run(Path(folder), model, "size_based")
            second, _ = _run(Path(folder), model, "kl_based")
            third, _ = _run(Path(folder), model, "cost_aware")
        by_size = first["metrics"]
        print(
            f"{model:<14} {DEVICES[model]:<8} {int(by_size['operators']):>9}"
            f" {by_size['weights_gib'] * 2**30 / 1e9:>10.2f} {by_size['capture_s']:>9.1f}"
            f" {peak / 1e9:>7.2f} | {by_size['latency_ms']:>13.3f}"
            f" {by_size['optimality_gap_pct']:>5.1f}%"
            f"{_search_columns(second['metrics'], by_size, 11)}"
            f"{_search_columns(third['metrics'], by_size, 13)}",
            flush=True,
        )


if __name__ == "__main__":
    main()
