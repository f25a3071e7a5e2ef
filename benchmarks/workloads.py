"""Published placement problems: what `mode=optimal` finds, beside the best values known.

    python -m benchmarks.workloads --data FOLDER [--time-limit-s 10] [--only NAME ...] [--modes ...]

FOLDER has the problems as JSON in `throughput/` and `latency/`, and a README.md whose tables say
what is known: their rows are read, nothing of them is kept here. A problem without a row is solved
too. Times are in ms; the seconds are of this process's CPU. With latency, an accelerator holds one
piece.
"""

import argparse
import itertools
import math
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.text_table import table
from fxpart.capture.models.workload import read_workload
from fxpart.core.workload import workload_graph, workload_topology
from fxpart.cost.evaluate import evaluate
from fxpart.cost.problem import Problem, make_problem
from fxpart.errors import InfeasibleError
from fxpart.placement import make_mode
from fxpart.placement.optimal.mode import WATCHER, Progress
from runner.experiment.objective import with_proven_bound

__all__ = ["Known", "main", "read_known", "workload_problem"]

OBJECTIVES = ("throughput", "latency")
_HEADINGS = {"throughput": "contiguous optimum", "latency": "published greedy"}


@dataclass(frozen=True, slots=True)
class Known:
    """A row of the tables of what is known, in ms."""

    bound: float
    best: float
    others: tuple[float, ...]
    """What published methods reach: none may be below ours."""


def read_known(readme: Path) -> dict[tuple[str, str], Known]:
    """Return what the tables of `readme` say, by objective and problem; nothing without a file."""
    known: dict[tuple[str, str], Known] = {}
    objective = ""
    for line in readme.read_text().splitlines() if readme.is_file() else []:
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if cells[0] in OBJECTIVES:
            objective = cells[0]
        elif objective and len(cells) > 6 and not set(cells[0]) <= set("-: "):
            last = 6 if objective == "throughput" else 7
            others = tuple(float(cell) for cell in cells[5:last])
            known[objective, cells[0]] = Known(float(cells[3]), float(cells[4]), others)
    return known


def workload_problem(path: Path, objective: str) -> Problem:
    """Return the problem in a file, under one of the two published objectives."""
    workload = read_workload(path, 1 if objective == "latency" else None)
    graph, topology = workload_graph(workload), workload_topology(workload)
    return make_problem(graph, topology, workload, objective)


@dataclass(frozen=True, slots=True)
class _Solved:
    value_ms: float
    bound_ms: float
    cpu_s: float


def _solved(path: Path, objective: str, mode: str, options: dict[str, object]) -> _Solved | None:
    """Return what `mode` finds, None where it refuses the problem."""
    begin = time.process_time()
    problem = workload_problem(path, objective)
    curve: list[Progress] = []
    token = WATCHER.set(curve.append)
    try:
        evaluation = evaluate(problem, make_mode(mode, options)(problem))
    except InfeasibleError:
        return None
    finally:
        WATCHER.reset(token)
    evaluation = with_proven_bound(evaluation, objective, curve)
    seconds = time.process_time() - begin
    if objective == "latency":
        return _Solved(evaluation.latency_s * 1e3, evaluation.lower_bound_s * 1e3, seconds)
    return _Solved(evaluation.load_s * 1e3, evaluation.load_bound_s * 1e3, seconds)


def _rows(
    arguments: argparse.Namespace,
    objective: str,
    mode: str,
    known: dict[tuple[str, str], Known],
) -> Iterator[tuple[list[str], float | None]]:
    """Yield a line of the table for each problem, and its value over the best known one."""
    paths = sorted((arguments.data / objective).glob("*.json"))
    for path in paths[:1]:  # compiles the loops, which is not to count
        _solved(path, objective, mode, {"steps": 1} if mode == "optimal" else {})
    for path in paths:
        if arguments.only and path.stem not in arguments.only:
            continue
        options = {"time_limit_s": arguments.time_limit_s, "seed": arguments.seed}
        solved = _solved(path, objective, mode, options if mode == "optimal" else {})
        if solved is None:
            yield [path.stem, "refused"] + [""] * 6, None
            continue
        row = known.get((objective, path.stem))
        line = [path.stem, f"{solved.value_ms:.3f}", f"{solved.bound_ms:.2f}"]
        over = None if row is None else solved.value_ms / row.best
        if row is None or over is None:
            line += ["", "", "", ""]
        else:
            line += [f"{row.bound:.2f}", f"{row.best:.2f}", f"{min(row.others):.2f}", f"{over:.4f}"]
        print(*line, f"{solved.cpu_s:.0f} s", file=sys.stderr, flush=True)
        yield [*line, f"{solved.cpu_s:.0f}"], over


def _geometric_mean(ratios: list[float]) -> float:
    return math.exp(sum(map(math.log, ratios)) / len(ratios))


def main(argv: list[str] | None = None) -> None:
    """Print a table for each objective."""
    parser = argparse.ArgumentParser(prog="benchmarks.workloads", description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--time-limit-s", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--modes", nargs="+", default=["optimal"])
    arguments = parser.parse_args(argv)
    if not arguments.data.is_dir():
        print(f"skipped: there is no folder {arguments.data} with published problems")
        return
    known = read_known(arguments.data / "README.md")
    for objective, mode in itertools.product(OBJECTIVES, arguments.modes):
        done = list(_rows(arguments, objective, mode, known))
        if not done:
            print(f"{objective}: no problems in {arguments.data / objective}")
            continue
        heading = ["", "value", "bound", "known bound", "best known", _HEADINGS[objective]]
        lines = [line for line, _ in done]
        limit = f"; {arguments.time_limit_s:g} s a problem" if mode == "optimal" else ""
        print(f"\n{objective}, ms, mode={mode}{limit}\n")
        print(table([*heading, "over best known", "CPU s"], lines))
        ratios = [over for _, over in done if over is not None]
        if ratios:
            mean = _geometric_mean(ratios)
            print(f"\nover best known: geometric mean {mean:.4f}, worst {max(ratios):.4f}")


if __name__ == "__main__":
    main()
