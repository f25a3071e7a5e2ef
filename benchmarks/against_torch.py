"""``python -m benchmarks.against_torch``: fxpart and torch's own partitioner on the same graphs.

Prints three tables: parity of answers where torch's is the reference, predicted latency where a
mode searches (torch's own functions evaluate both), and seconds by size. ``--quick`` takes about
two minutes, the full run an hour. The exit code is 1 if an answer of fxpart has to be fixed.
"""

import argparse
import time
from typing import TYPE_CHECKING

import torch

from benchmarks.compare_answers import compare_answers
from benchmarks.compare_latency import LatencyPlan, compare_latency
from benchmarks.compare_speed import SERIES, SpeedPlan, compare_speed

if TYPE_CHECKING:
    from benchmarks.two_sides import Mode

_PARTS = ("parity", "latency", "speed")


def _parse_arguments() -> argparse.Namespace:
    """Return the parsed command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.against_torch")
    parser.add_argument("--quick", action="store_true", help="few graphs and small sizes")
    parser.add_argument(
        "--only", choices=_PARTS, action="append", help="one table; may be repeated"
    )
    parser.add_argument(
        "--limit", type=float, help="limit in seconds for one run of torch in the speed table"
    )
    parser.add_argument("--graphs", type=int, help="number of random graphs for each question")
    return parser.parse_args()


def _latency_plan(quick: bool, graphs: int) -> LatencyPlan:
    max_operators: dict[Mode, int]
    max_operators = (
        {"kl_based": 30, "cost_aware": 24} if quick else {"kl_based": 90, "cost_aware": 40}
    )
    return LatencyPlan(graphs, max_operators, small_only=quick, limit_s=10.0 if quick else 120.0)


def _speed_plan(quick: bool, limit_s: float) -> SpeedPlan:
    if quick:
        return SpeedPlan(limit_s, (300, 1000), (SERIES[0], SERIES[6]))
    return SpeedPlan(limit_s, (300, 1000, 3000, 10_000))


def main() -> None:
    """Print the selected tables."""
    options = _parse_arguments()
    # The tensors are small: more threads would only add noise to the times.
    torch.set_num_threads(1)
    parts = options.only or _PARTS
    wrong = 0
    for part in parts:
        begin = time.perf_counter()
        if part == "parity":
            wrong += compare_answers(
                options.graphs or (20 if options.quick else 500), options.quick
            )
        elif part == "latency":
            graphs = options.graphs or (40 if options.quick else 500)
            wrong += compare_latency(_latency_plan(options.quick, graphs))
        else:
            limit_s = options.limit or (5.0 if options.quick else 120.0)
            wrong += compare_speed(_speed_plan(options.quick, limit_s))
        print(f"{part}: {time.perf_counter() - begin:.0f} s\n", flush=True)
    print(f"answers of fxpart to fix: {wrong}")
    raise SystemExit(wrong > 0)


if __name__ == "__main__":
    main()
