"""``python -m benchmarks.scale [--only GRAPH ...] [--modes MODE ...]``: time and memory at scale.

For each graph and each mode, in a fresh process: the seconds that the mode takes, the peak resident
memory of the process, the latency of the plan and its gap to the lower bound, beside the targets.
The seconds are of the mode alone: the graph is captured once before and cached; reading it, the
tables of the problem, the evaluation and the compilation of inner loops (each process first places
a small graph) are excluded. The memory includes all of that. `aot_based` gets the plan of
`size_based`, and its seconds are those of reading and checking it.
"""

import argparse
import hashlib
import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.process import Measured, run_python
from fxpart.capture.cache import cache_key, cached_path
from fxpart.placement import MODES


@dataclass(frozen=True, slots=True)
class _Target:
    """The devices on which a graph is placed, and the target limits."""

    devices: str
    limits_s: dict[str, float]
    """Limit by mode; ``""`` for all others."""
    limit_gb: float | None = None


GRAPHS = {
    "llama2_13b": _Target("4x16gb", {"size_based": 0.1, "kl_based": 5.0, "cost_aware": 10.0}),
    "llama3_70b_training": _Target("16x80gb", {"": 60.0}),
    "synthetic": _Target("4x16gb", {"": 300.0}, 4.0),
    "chain": _Target("4x16gb", {}),
    "diamonds": _Target("4x16gb", {}),
}
_PLACING = [mode for mode in MODES if mode not in ("accelerate", "custom")]
"""The modes that need nothing but the graph."""
_STOPPED_AFTER_S = 600.0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scale", description=__doc__)
    parser.add_argument("--only", nargs="+", choices=GRAPHS, default=list(GRAPHS), metavar="GRAPH")
    parser.add_argument("--modes", nargs="+", choices=_PLACING, default=_PLACING, metavar="MODE")
    parser.add_argument("--cache", type=Path, help="folder of cached graphs")
    parser.add_argument(
        "--stop-s",
        type=float,
        default=_STOPPED_AFTER_S,
        help="stop a mode after so many seconds (default: %(default)s)",
    )
    return parser.parse_args()


def _job(folder: Path, *arguments: str) -> tuple[dict[str, Any] | None, Measured]:
    """Return the result of a `benchmarks.scale_job` process, None if it was stopped."""
    measured = run_python(["-m", "benchmarks.scale_job", *arguments], folder, may_fail=True)
    lines = measured.output.strip().splitlines()
    return (json.loads(lines[-1]) if lines else None), measured


def _captured(folder: Path, cache: Path, graph: str) -> Path:
    """Return the file of the captured graph, capturing it if it is missing."""
    # Different code may capture a different graph.
    source_files = [Path(__file__).with_name(name) for name in ("scale_job.py", "synthetic.py")]
    sources = [hashlib.sha256(path.read_bytes()).hexdigest() for path in source_files]
    file = cached_path(cache, cache_key({"benchmark": graph, "sources": sources}, "operator"))
    if file.exists():
        print(f"{graph}: cached in {file.name}")
        return file
    result, measured = _job(folder, "capture", graph, str(file))
    if result is None:
        raise SystemExit(f"{graph} was not captured; run: python -m benchmarks.scale_job capture")
    print(f"{graph}: captured in {result['capture_s']:.1f} s, {measured.peak_bytes / 1e9:.2f} GB")
    return file


def _print_tools(folder: Path, file: Path, devices: str) -> None:
    result, _ = _job(folder, "tools", str(file), devices)
    if result is None:
        print("  evaluate and partition_by_device ended without a result")
        return
    weights = result["weight_bytes"] / 1e9
    print(
        f"  {result['operators']} operators, weights {weights:.2f} GB, on {devices};"
        f" tables {1e3 * result['tables_s']:.0f} ms"
    )
    for name in ("contiguous", "scattered"):
        print(
            f"  {name:<11} partition_by_device {1e3 * result[f'partition_{name}_s']:>9.1f} ms"
            f"  evaluate {1e3 * result[f'evaluate_{name}_s']:>7.1f} ms"
            f"  {result[f'partitions_{name}']} partitions",
            flush=True,
        )


def _print_mode(folder: Path, file: Path, target: _Target, mode: str, stop_s: float) -> None:
    result, measured = _job(folder, "place", str(file), target.devices, mode, str(stop_s))
    limit_s = target.limits_s.get(mode, target.limits_s.get(""))
    limit = "-" if limit_s is None else f"{limit_s:g}"
    limit_gb = "-" if target.limit_gb is None else f"{target.limit_gb:g}"
    peak = f"{measured.peak_bytes / 1e9:>7.2f} {limit_gb:>5}"
    if result is None:
        print(f"  {mode:<11} {'stopped':>9} {limit:>6} {peak}  after {stop_s:g} s, or it crashed")
    elif "error" in result:
        print(f"  {mode:<11} {result['seconds']:>9.3f} {limit:>6} {peak}  {result['error'][:90]}")
    else:
        print(
            f"  {mode:<11} {result['seconds']:>9.3f} {limit:>6} {peak}"
            f" {1e3 * result['latency_s']:>11.3f} {1e3 * result['lower_bound_s']:>11.3f}"
            f" {result['gap']:>7.1%} {result['partitions']:>10}",
            flush=True,
        )


def main() -> None:
    """Print a block for each graph with a row for each mode."""
    chosen = _arguments()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        cache = (chosen.cache or folder / "graphs").resolve()
        for graph in chosen.only:
            file, target = _captured(folder, cache, graph), GRAPHS[graph]
            _print_tools(folder, file, target.devices)
            print(
                f"  {'mode':<11} {'s':>9} {'limit':>6} {'peak GB':>7} {'limit':>5}"
                f" {'latency ms':>11} {'bound ms':>11} {'gap':>7} {'partitions':>10}",
                flush=True,
            )
            for mode in chosen.modes:
                _print_mode(folder, file, target, mode, chosen.stop_s)


if __name__ == "__main__":
    main()
