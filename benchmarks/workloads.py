"""Published placement problems: results of `mode=optimal` beside the best known values.

    python -m benchmarks.workloads --data FOLDER [--time-limit-s 10 | --cpu-limit-s 10]
        [--without-mtkahypar] [--only NAME ...] [--modes ...]

FOLDER has the problems as JSON in `throughput/` and `latency/`, and a README.md whose tables are
the source of the known values. A problem without a row is solved too. Each value is recomputed from
the JSON by `benchmarks.published_values`, which must agree. Times are in ms; the seconds are CPU
and wall-clock time of this process. On a busy machine limit the CPU time. For latency, an
accelerator holds one piece.
"""

import argparse
import itertools
import math
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.published_values import largest_load_ms, sample_ms
from benchmarks.text_table import table
from benchmarks.time_limit import limited
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
_SAME = 1e-6
_ROUNDED_MS = 0.005
"""Largest rounding error of values in the tables."""
_UNLIMITED_S = 1e6
_HEADINGS = {"throughput": "contiguous optimum", "latency": "published greedy"}


@dataclass(frozen=True, slots=True)
class Known:
    """A row of the tables of known values, in ms."""

    bound: float
    best: float
    others: tuple[float, ...]
    """Values of published methods: none may be below ours."""


def read_known(readme: Path) -> dict[tuple[str, str], Known]:
    """Return the known values in `readme` by objective and problem; empty without a file."""
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
    """Return the problem in a file for one of the two published objectives."""
    workload = read_workload(path, 1 if objective == "latency" else None)
    graph, topology = workload_graph(workload), workload_topology(workload)
    return make_problem(graph, topology, workload, objective)


@dataclass(frozen=True, slots=True)
class _Solution:
    value_ms: float
    bound_ms: float
    cpu_s: float
    clock_s: float


def _solve(
    path: Path, objective: str, mode: str, options: dict[str, object], cpu_limit_s: float | None
) -> _Solution | None:
    """Return the solution of `mode`, None if it refuses the problem."""
    begin = time.process_time(), time.monotonic()
    problem = workload_problem(path, objective)
    curve: list[Progress] = []
    token = WATCHER.set(curve.append)
    try:
        # At an interrupt, `optimal` returns the best plan so far.
        with limited(cpu_limit_s, of_cpu=True):
            placed = make_mode(mode, options)(problem)
    except InfeasibleError:
        return None
    finally:
        WATCHER.reset(token)
    evaluation = with_proven_bound(evaluate(problem, placed), objective, curve)
    seconds = time.process_time() - begin[0], time.monotonic() - begin[1]
    by_name = dict(zip(problem.graph.names, placed.device_of.tolist(), strict=True))
    if objective == "latency":
        value_ms, recomputed_ms = evaluation.latency_s * 1e3, sample_ms(path, by_name)
        bound_ms = evaluation.lower_bound_s * 1e3
    else:
        value_ms, recomputed_ms = evaluation.load_s * 1e3, largest_load_ms(path, by_name)
        bound_ms = evaluation.load_bound_s * 1e3
    if not math.isclose(value_ms, recomputed_ms, rel_tol=_SAME):
        raise SystemExit(f"{path}: {value_ms} ms by fxpart, {recomputed_ms} ms by the definition")
    return _Solution(value_ms, bound_ms, *seconds)


def _rows(
    arguments: argparse.Namespace,
    objective: str,
    mode: str,
    known: dict[tuple[str, str], Known],
) -> Iterator[tuple[list[str], float | None]]:
    """Yield a table row for each problem, and its value over the best known one."""
    paths = sorted((arguments.data / objective).glob("*.json"))
    for path in paths[:1]:  # warm-up: compiles the loops
        _solve(path, objective, mode, {"steps": 1} if mode == "optimal" else {}, None)
    for path in paths:
        if arguments.only and path.stem not in arguments.only:
            continue
        options = {"time_limit_s": arguments.time_limit_s, "seed": arguments.seed}
        if arguments.cpu_limit_s is not None:
            options["time_limit_s"] = _UNLIMITED_S
        is_limited = mode == "optimal"
        solution = _solve(
            path,
            objective,
            mode,
            options if is_limited else {},
            arguments.cpu_limit_s if is_limited else None,
        )
        if solution is None:
            yield [path.stem, "refused"] + [""] * 7, None
            continue
        row = known.get((objective, path.stem))
        line = [path.stem, f"{solution.value_ms:.3f}", f"{solution.bound_ms:.2f}"]
        ratio = None if row is None else solution.value_ms / row.best
        if row is None or ratio is None:
            line += ["", "", "", ""]
        else:
            line += [
                f"{row.bound:.2f}",
                f"{row.best:.2f}",
                f"{min(row.others):.2f}",
                f"{ratio:.4f}",
            ]
        line += [f"{solution.cpu_s:.0f}", f"{solution.clock_s:.0f}"]
        print(objective, *line, file=sys.stderr, flush=True)
        yield line, ratio


def _is_new(line: list[str]) -> bool:
    """Return whether the value of a row is below the best known one beyond rounding."""
    return float(line[1]) < float(line[4]) - _ROUNDED_MS


def _geometric_mean(ratios: list[float]) -> float:
    return math.exp(sum(map(math.log, ratios)) / len(ratios))


def main(argv: list[str] | None = None) -> None:
    """Print a table for each objective."""
    parser = argparse.ArgumentParser(prog="benchmarks.workloads", description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--time-limit-s", type=float, default=10.0)
    parser.add_argument(
        "--cpu-limit-s", type=float, help="CPU seconds of all threads, instead of a time limit"
    )
    parser.add_argument("--without-mtkahypar", action="store_true", help="as if not installed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--modes", nargs="+", default=["optimal"])
    arguments = parser.parse_args(argv)
    if not arguments.data.is_dir():
        print(f"skipped: there is no folder {arguments.data} with published problems")
        return
    if arguments.without_mtkahypar:
        sys.modules["mtkahypar"] = None  # type: ignore[assignment]
    known = read_known(arguments.data / "README.md")
    for objective, mode in itertools.product(OBJECTIVES, arguments.modes):
        results = list(_rows(arguments, objective, mode, known))
        if not results:
            print(f"{objective}: no problems in {arguments.data / objective}")
            continue
        heading = ["", "value", "bound", "known bound", "best known", _HEADINGS[objective]]
        lines = [line for line, _ in results]
        limit = f"{arguments.time_limit_s:g} s"
        if arguments.cpu_limit_s is not None:
            limit = f"{arguments.cpu_limit_s:g} s of CPU"
        limit = f"; {limit} a problem" if mode == "optimal" else ""
        print(f"\n{objective}, ms, mode={mode}{limit}\n")
        print(table([*heading, "over best known", "CPU s", "s"], lines))
        ratios = [ratio for _, ratio in results if ratio is not None]
        if ratios:
            mean = _geometric_mean(ratios)
            print(f"\nover best known: geometric mean {mean:.4f}, worst {max(ratios):.4f}")
        new = [
            f"{line[0]} {line[1]}" for line, ratio in results if ratio is not None and _is_new(line)
        ]
        print(f"below best known: {', '.join(new) or 'none'}")


if __name__ == "__main__":
    main()
