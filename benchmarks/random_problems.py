"""``python -m benchmarks.random_problems [problems] [--operators N]``: modes beside brute force.

Random graphs of 2 to 9 operators (branches, views, tied weights, groups) on 2 to 4 devices that
differ in speed and memory, with a separate link between each pair; 500 problems by default. Memory
is tight: all devices together have 1 to 3 times what the model needs on one. Brute force simulates
every placement that fits; above 10 operators the best of two seeds of `optimal` replaces it.
`refused` counts problems that have a placement but were refused, `equal` optimal plans, `worst` is
the largest relative distance to the optimum. ``bound`` is the bound over the optimum, never above
1; `formula` is the bound used for larger problems, which branch and bound cannot prove. For
throughput, the values are largest loads.
"""

import argparse
import itertools
import math
import sys
import time
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass, field, replace

import numpy as np

from benchmarks.text_table import table
from fxpart.core.graph import IntArray
from fxpart.core.topology import Link, with_pair_links
from fxpart.cost.bounds import load_bound_s, lower_bound_s
from fxpart.cost.evaluate import evaluate
from fxpart.cost.kernels import ScheduleLog, peak_on_device, schedule, schedule_log
from fxpart.cost.problem import BY_TIME, Problem
from fxpart.cost.tables import CostTables, MemoryTables
from fxpart.errors import InfeasibleError
from fxpart.placement import make_mode
from fxpart.support.compiled import compiled
from tests import independent
from tests.sketch import devices, problem, random_graph

__all__ = ["brute_force", "main", "random_problem"]

MODES: dict[str, dict[str, object]] = {
    "size_based": {},
    "kl_based": {},
    "cost_aware": {},
    "optimal": {"steps": 60},
}
_ROUNDING = 1e-9
_LARGE_GAP = 0.1
_MAX_BRUTE_FORCE = 10
"""Largest number of operators for which all placements are simulated."""


def random_problem(seed: int, operators: int | None = None) -> Problem:
    """Return a small problem with unequal devices and links and tight memory.

    It has 2 to 9 operators by default.
    """
    random = np.random.default_rng(seed)
    random_size = int(random.integers(2, 10))
    graph = random_graph(seed, random_size if operators is None else operators)
    count = int(random.integers(2, 5))
    peak_bytes = independent.peak_bytes(graph, np.zeros(graph.n_ops, dtype=np.int64), 0)
    share = random.uniform(1.0, 3.0) / count
    sizes = [max(1, int(peak_bytes * share * random.uniform(0.5, 1.5))) for _ in range(count)]
    speeds = random.choice([0.5, 1.0, 2.0, 4.0], size=count).tolist()
    topology = devices(*sizes, speeds=speeds)
    pairs = [(a, b) for a in range(count) for b in range(a)]
    links = {
        pair: Link(float(random.choice([0.5, 2.0, 8.0])), float(random.choice([0.0, 0.25])))
        for pair in pairs
    }
    return problem(graph, with_pair_links(topology, links))


@compiled
def _enumerate(
    t: CostTables, m: MemoryTables, memory_bytes: IntArray, group: IntArray, log: ScheduleLog
) -> tuple[float, float]:
    """Return the minimum latency and load over all placements that fit, infinite if none."""
    n, count = group.shape[0], memory_bytes.shape[0]
    firsts = np.unique(group)
    device_of, change = np.zeros(n, dtype=np.int64), np.empty(n + 1, dtype=np.int64)
    latency_s, load_s = np.inf, np.inf
    for number in range(count ** firsts.shape[0]):
        digits = number
        for i in range(firsts.shape[0]):
            device_of[firsts[i]] = digits % count
            digits //= count
        for op in range(n):
            device_of[op] = device_of[group[op]]
        fits = True
        for device in range(count):
            fits &= peak_on_device(m, device_of, device, change) <= memory_bytes[device]
        if not fits:
            continue
        seconds, sent = schedule(t, device_of, log)
        latency_s = min(latency_s, seconds)
        loads, links = np.zeros(count), np.zeros((count, count))
        for op in range(n):
            loads[device_of[op]] += t.op_time_s[op, device_of[op]]
        for i in range(sent):
            links[log.sent[i, 1], log.sent[i, 2]] += log.sent_s[i, 1] - log.sent_s[i, 0]
        load_s = min(load_s, max(loads.max(), links.max()))
    return latency_s, load_s


def brute_force(task: Problem) -> dict[str, float]:
    """Return the minimum of each objective in seconds, infinite if no placement fits."""
    least = _enumerate(
        task.costs,
        task.memory,
        task.topology.memory_bytes,
        task.graph.group,
        schedule_log(task.costs),
    )
    return dict(zip(BY_TIME, least, strict=True))


def _best_of_optimal(task: Problem) -> dict[str, float]:
    """Return the minimum of each objective that `optimal` finds, infinite if it refuses."""
    best = dict.fromkeys(BY_TIME, math.inf)
    for objective, seed in itertools.product(BY_TIME, (0, 1)):
        place = make_mode("optimal", {"steps": 60, "seed": seed})
        with suppress(InfeasibleError):
            evaluation = evaluate(task, place(replace(task, objective=objective)))
            values = {"latency": evaluation.latency_s, "throughput": evaluation.load_s}
            best[objective] = min(best[objective], values[objective])
    return best


@dataclass(slots=True)
class _Tally:
    """The results of one mode on the problems that have a placement, for one objective."""

    ratios: list[float] = field(default_factory=list)
    """The value over the optimum for each placement returned."""
    refused: int = 0
    cpu_s: float = 0.0

    def line(self) -> list[str]:
        ratios = np.array(self.ratios)
        return [
            str(len(ratios)),
            str(self.refused),
            str(int((ratios < 1 - _ROUNDING).sum())),
            str(int((ratios <= 1 + _ROUNDING).sum())),
            f"{ratios.mean() - 1:.2%}",
            f"{ratios.max() - 1:.1%}",
            str(int((ratios > 1 + _LARGE_GAP).sum())),
            f"{self.cpu_s:.1f}",
        ]


def _relative(value: float, least: float) -> float:
    """Return a value relative to the optimum; both may be zero."""
    return value / least if least > 0 else 1.0 + value


def _try_mode(task: Problem, mode: str, least: float, tally: _Tally) -> float | None:
    """Count the result of `mode` on a problem; return the bound over the optimum."""
    begin = time.process_time()
    try:
        placed = make_mode(mode, MODES[mode])(task)
    except InfeasibleError:
        tally.refused += 1
        return None
    finally:
        tally.cpu_s += time.process_time() - begin
    evaluation = evaluate(task, placed)
    if task.objective == "latency":
        value, bound = evaluation.latency_s, evaluation.lower_bound_s
    else:
        value, bound = evaluation.load_s, evaluation.load_bound_s
    tally.ratios.append(_relative(value, least))
    return bound / least if least > 0 else 1.0


def main(argv: list[str] | None = None) -> None:
    """Print a table of modes and one of bounds."""
    parser = argparse.ArgumentParser(prog="benchmarks.random_problems", description=__doc__)
    parser.add_argument("problems", type=int, nargs="?", default=500)
    parser.add_argument("--modes", nargs="*", default=list(MODES))
    parser.add_argument(
        "--operators", type=int, help="operators of each problem; brute force of 10 takes minutes"
    )
    arguments = parser.parse_args(argv)
    tallies: dict[tuple[str, str], _Tally] = defaultdict(_Tally)
    bounds: dict[str, list[float]] = defaultdict(list)
    solvable = 0
    for seed in range(arguments.problems):
        task = random_problem(seed, arguments.operators)
        least = (brute_force if task.graph.n_ops <= _MAX_BRUTE_FORCE else _best_of_optimal)(task)
        solvable += math.isfinite(least["latency"])
        for objective, formula in zip(BY_TIME, (lower_bound_s, load_bound_s), strict=True):
            if 0 < least[objective] < math.inf:
                bounds[f"{objective}, formula"].append(formula(task) / least[objective])
            variant = replace(task, objective=objective)
            if math.isinf(least[objective]):
                continue
            for mode in arguments.modes:
                tally = tallies[objective, mode]
                share = _try_mode(variant, mode, least[objective], tally)
                if share is not None and mode == arguments.modes[0]:
                    bounds[objective].append(share)
                worst = tally.ratios[-1] if tally.ratios else 1.0
                if share is None or worst > 1 + _LARGE_GAP or worst < 1 - _ROUNDING:
                    print(seed, objective, mode, share and f"{worst:.3f}", file=sys.stderr)
    print(f"{arguments.problems} problems, {solvable} of them have a placement\n")
    heads = ["", "placed", "refused", "below", "equal", "mean", "worst", "> 10 %", "CPU s"]
    rows = [[f"{objective} {mode}", *tally.line()] for (objective, mode), tally in tallies.items()]
    print(table(heads, rows))
    print()
    rows = [
        [
            objective,
            f"{np.mean(shares):.3f}",
            f"{min(shares):.3f}",
            str(sum(share > 1 + _ROUNDING for share in shares)),
        ]
        for objective, shares in bounds.items()
    ]
    print(table(["bound / optimum", "mean", "least", "above 1"], rows))


if __name__ == "__main__":
    main()
