"""Published placement problems: what `mode=optimal` finds, beside the best values known.

    python -m benchmarks.workloads --data FOLDER [--time-limit-s 10 | --cpu-limit-s 10]
        [--without-mtkahypar] [--only NAME ...] [--modes ...]

FOLDER has the problems as JSON in `throughput/` and `latency/`, and a README.md whose tables say
what is known: their rows are read, nothing of them is kept here. A problem without a row is solved
too. Each value is computed again from the JSON by `benchmarks.published_values`, which must agree.
Times are in ms; the seconds are of this process, by its CPU and by the clock. On a busy machine
limit the CPU. With latency, an accelerator holds one piece.
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
"""By which values of the tables are rounded, at most."""
_ENDLESS_S = 1e6
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
    clock_s: float


def _solved(
    path: Path, objective: str, mode: str, options: dict[str, object], cpu_limit_s: float | None
) -> _Solved | None:
    """Return what `mode` finds, None where it refuses the problem."""
    began = time.process_time(), time.monotonic()
    problem = workload_problem(path, objective)
    curve: list[Progress] = []
    token = WATCHER.set(curve.append)
    try:
        # An interrupt, at which `optimal` returns the best so far.
        with limited(cpu_limit_s, of_cpu=True):
            placed = make_mode(mode, options)(problem)
    except InfeasibleError:
        return None
    finally:
        WATCHER.reset(token)
    evaluation = with_proven_bound(evaluate(problem, placed), objective, curve)
    seconds = time.process_time() - began[0], time.monotonic() - began[1]
    by_name = dict(zip(problem.graph.names, placed.device_of.tolist(), strict=True))
    if objective == "latency":
        value_ms, again_ms = evaluation.latency_s * 1e3, sample_ms(path, by_name)
        bound_ms = evaluation.lower_bound_s * 1e3
    else:
        value_ms, again_ms = evaluation.load_s * 1e3, largest_load_ms(path, by_name)
        bound_ms = evaluation.load_bound_s * 1e3
    if not math.isclose(value_ms, again_ms, rel_tol=_SAME):
        raise SystemExit(f"{path}: {value_ms} ms by fxpart, {again_ms} ms by the definition")
    return _Solved(value_ms, bound_ms, *seconds)


def _rows(
    arguments: argparse.Namespace,
    objective: str,
    mode: str,
    known: dict[tuple[str, str], Known],
) -> Iterator[tuple[list[str], float | None]]:
    """Yield a line of the table for each problem, and its value over the best known one."""
    paths = sorted((arguments.data / objective).glob("*.json"))
    for path in paths[:1]:  # compiles the loops, which is not to count
        _solved(path, objective, mode, {"steps": 1} if mode == "optimal" else {}, None)
    for path in paths:
        if arguments.only and path.stem not in arguments.only:
            continue
        options = {"time_limit_s": arguments.time_limit_s, "seed": arguments.seed}
        if arguments.cpu_limit_s is not None:
            options["time_limit_s"] = _ENDLESS_S
        is_limited = mode == "optimal"
        solved = _solved(
            path,
            objective,
            mode,
            options if is_limited else {},
            arguments.cpu_limit_s if is_limited else None,
        )
        if solved is None:
            yield [path.stem, "refused"] + [""] * 7, None
            continue
        row = known.get((objective, path.stem))
        line = [path.stem, f"{solved.value_ms:.3f}", f"{solved.bound_ms:.2f}"]
        over = None if row is None else solved.value_ms / row.best
        if row is None or over is None:
            line += ["", "", "", ""]
        else:
            line += [f"{row.bound:.2f}", f"{row.best:.2f}", f"{min(row.others):.2f}", f"{over:.4f}"]
        line += [f"{solved.cpu_s:.0f}", f"{solved.clock_s:.0f}"]
        print(objective, *line, file=sys.stderr, flush=True)
        yield line, over


def _is_new(line: list[str]) -> bool:
    """Return whether a line's value is below the best known one, however that was rounded."""
    return float(line[1]) < float(line[4]) - _ROUNDED_MS


def _geometric_mean(ratios: list[float]) -> float:
    return math.exp(sum(map(math.log, ratios)) / len(ratios))


def main(argv: list[str] | None = None) -> None:
    """Print a table for each objective."""
    parser = argparse.ArgumentParser(prog="benchmarks.workloads", description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--time-limit-s", type=float, default=10.0)
    parser.add_argument("--cpu-limit-s", type=float, help="of all threads, in place of a time")
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
        done = list(_rows(arguments, objective, mode, known))
        if not done:
            print(f"{objective}: no problems in {arguments.data / objective}")
            continue
        heading = ["", "value", "bound", "known bound", "best known", _HEADINGS[objective]]
        lines = [line for line, _ in done]
        limit = f"{arguments.time_limit_s:g} s"
        if arguments.cpu_limit_s is not None:
            limit = f"{arguments.cpu_limit_s:g} s of CPU"
        limit = f"; {limit} a problem" if mode == "optimal" else ""
        print(f"\n{objective}, ms, mode={mode}{limit}\n")
        print(table([*heading, "over best known", "CPU s", "s"], lines))
        ratios = [over for _, over in done if over is not None]
        if ratios:
            mean = _geometric_mean(ratios)
            print(f"\nover best known: geometric mean {mean:.4f}, worst {max(ratios):.4f}")
        new = [f"{line[0]} {line[1]}" for line, over in done if over is not None and _is_new(line)]
        print(f"below best known: {', '.join(new) or 'none'}")


if __name__ == "__main__":
    main()
