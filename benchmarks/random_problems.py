"""``python -m benchmarks.random_problems [problems] [--operators N]``: modes beside brute force.

Random graphs of 2 to 9 operators (branches, views, tied weights, groups) on 2 to 4 devices that
differ in speed and memory, with a link of its own between each pair; 500 unless said otherwise.
Memory is tight: devices together have 1 to 3 times what the model takes on one. Brute force
simulates every placement that fits; of more than 10 operators the best of two seeds of `optimal`
stands in its place. `refused` counts problems that have a placement and were refused, `equal`
optimal plans, `worst` how far above the optimum a plan is at most. ``bound`` is the bound over the
optimum, which is never above 1; `formula` is that of larger problems, of which branch and bound
proves nothing. Of throughput, values are largest loads.
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
_MUCH = 0.1
_MOST_BY_FORCE = 10
"""Operators of which all placements are simulated."""


def random_problem(seed: int, operators: int | None = None) -> Problem:
    """Return a small problem with unlike devices and links, whose memory is tight.

    Of 2 to 9 operators unless said otherwise.
    """
    random = np.random.default_rng(seed)
    drawn = int(random.integers(2, 10))
    graph = random_graph(seed, drawn if operators is None else operators)
    count = int(random.integers(2, 5))
    whole = independent.peak_bytes(graph, np.zeros(graph.n_ops, dtype=np.int64), 0)
    share = random.uniform(1.0, 3.0) / count
    sizes = [max(1, int(whole * share * random.uniform(0.5, 1.5))) for _ in range(count)]
    speeds = random.choice([0.5, 1.0, 2.0, 4.0], size=count).tolist()
    topology = devices(*sizes, speeds=speeds)
    pairs = [(a, b) for a in range(count) for b in range(a)]
    links = {
        pair: Link(float(random.choice([0.5, 2.0, 8.0])), float(random.choice([0.0, 0.25])))
        for pair in pairs
    }
    return problem(graph, with_pair_links(topology, links))


@compiled
def _least(
    t: CostTables, m: MemoryTables, room: IntArray, group: IntArray, log: ScheduleLog
) -> tuple[float, float]:
    """Return the least latency and the least load of all placements that fit, infinite if none."""
    n, count = group.shape[0], room.shape[0]
    firsts = np.unique(group)
    device_of, change = np.zeros(n, dtype=np.int64), np.empty(n + 1, dtype=np.int64)
    latency_s, load_s = np.inf, np.inf
    for number in range(count ** firsts.shape[0]):
        rest = number
        for i in range(firsts.shape[0]):
            device_of[firsts[i]] = rest % count
            rest //= count
        for op in range(n):
            device_of[op] = device_of[group[op]]
        fits = True
        for device in range(count):
            fits &= peak_on_device(m, device_of, device, change) <= room[device]
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
    """Return the least value of each objective in s, infinite where no placement fits."""
    least = _least(
        task.costs,
        task.memory,
        task.topology.memory_bytes,
        task.graph.group,
        schedule_log(task.costs),
    )
    return dict(zip(BY_TIME, least, strict=True))


def _best_found(task: Problem) -> dict[str, float]:
    """Return the least value of each objective that `optimal` finds, infinite where it refuses."""
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
    """What one mode did on the problems that have a placement, with one objective."""

    ratios: list[float] = field(default_factory=list)
    """The value over the optimum, where a placement was returned."""
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
            str(int((ratios > 1 + _MUCH).sum())),
            f"{self.cpu_s:.1f}",
        ]


def _over(value: float, least: float) -> float:
    """Return a value over the least one, both of which may be zero."""
    return value / least if least > 0 else 1.0 + value


def _tried(task: Problem, mode: str, least: float, tally: _Tally) -> float | None:
    """Count what `mode` does with a problem; return the bound over the optimum."""
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
    tally.ratios.append(_over(value, least))
    return bound / least if least > 0 else 1.0


def main(argv: list[str] | None = None) -> None:
    """Print a table of modes and one of bounds."""
    parser = argparse.ArgumentParser(prog="benchmarks.random_problems", description=__doc__)
    parser.add_argument("problems", type=int, nargs="?", default=500)
    parser.add_argument("--modes", nargs="*", default=list(MODES))
    parser.add_argument("--operators", type=int, help="of each problem; brute force of 10: minutes")
    arguments = parser.parse_args(argv)
    tallies: dict[tuple[str, str], _Tally] = defaultdict(_Tally)
    bounds: dict[str, list[float]] = defaultdict(list)
    solvable = 0
    for seed in range(arguments.problems):
        task = random_problem(seed, arguments.operators)
        least = (brute_force if task.graph.n_ops <= _MOST_BY_FORCE else _best_found)(task)
        solvable += math.isfinite(least["latency"])
        for objective, formula in zip(BY_TIME, (lower_bound_s, load_bound_s), strict=True):
            if 0 < least[objective] < math.inf:
                bounds[f"{objective}, formula"].append(formula(task) / least[objective])
            asked = replace(task, objective=objective)
            if math.isinf(least[objective]):
                continue
            for mode in arguments.modes:
                tally = tallies[objective, mode]
                share = _tried(asked, mode, least[objective], tally)
                if share is not None and mode == arguments.modes[0]:
                    bounds[objective].append(share)
                worst = tally.ratios[-1] if tally.ratios else 1.0
                if share is None or worst > 1 + _MUCH or worst < 1 - _ROUNDING:
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
