"""The objective of a search: its checks, metrics and progress, and published problems."""

import math
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import numpy as np

from fxpart.capture.captured import CapturedGraph
from fxpart.core.workload import Workload, workload_graph
from fxpart.cost.energy import energy_j, powers_w
from fxpart.cost.evaluation import Evaluation
from fxpart.cost.problem import OBJECTIVES, Problem
from fxpart.errors import SpecError, nearest_names
from fxpart.placement.optimal.mode import UNITS, WATCHER, Progress
from fxpart.placement.search.full_evaluations import BY_WHOLE, bound_of
from runner.config.schema import Config
from runner.experiment.mesh import replica_count
from runner.output.terminal import counted
from runner.output.units import GIB, format_s, format_size

__all__ = [
    "check_objective",
    "objective_line",
    "objective_metrics",
    "published_graph",
    "search_series",
    "watched",
    "with_proven_bound",
]

_SHOWN_EVERY_S = 1.0
_SERIES = {
    "s": ("search_best_ms", 1e3),
    "B": ("search_best_gib", 1 / GIB),
    "J": ("search_best_j", 1.0),
}


def check_objective(config: Config) -> None:
    """Check the objective, and that a published problem has no settings that apply only to models.

    Raises:
        SpecError: if not; the message says what to use.

    """
    if config.objective not in OBJECTIVES:
        raise SpecError(
            f"objective={config.objective} does not exist;"
            f" {nearest_names(config.objective, OBJECTIVES)}"
        )
    is_repeated = config.schedule.name != "none" or replica_count(config) > 1
    if config.objective in BY_WHOLE and is_repeated:
        raise SpecError(
            f"objective={config.objective} applies to one input, without schedule, data_parallel "
            "and context_parallel; leave those out, or use objective=throughput"
        )
    if config.model.path is None:
        return
    for key, value, usual in (
        ("phase", config.phase.name, "inference"),
        ("schedule", config.schedule.name, "none"),
        ("execute", config.execute.name, "none"),
        ("latency", config.latency.source, "roofline"),
        ("capture.symbolic", config.capture.symbolic, "none"),
        ("data_parallel", config.data_parallel, 1),
        ("tensor_parallel", config.tensor_parallel, 1),
        ("weights", config.weights.name, "none"),
        ("granularity", config.granularity, "operator"),
        ("model.batch_size", config.model.batch_size, 1),
        ("runtime.host_launch_s", config.runtime.host_launch_s, None),
    ):
        if value != usual:
            use = "null" if usual is None else usual
            raise SpecError(
                f"{key}={value} applies to models, but the times of model=workload are given; use "
                f"{key}={use}"
            )


def published_graph(config: Config) -> tuple[CapturedGraph, Workload]:
    """Read the published problem at `config.model.path`, and return its graph and the problem.

    With ``objective=latency`` an accelerator holds a single piece of the model, which runs whole.

    Raises:
        FxpartError: if the file is not such a problem.

    """
    from fxpart.capture.models.workload import read_workload

    begin = time.perf_counter()
    pieces = 1 if config.objective == "latency" else None
    workload = read_workload(Path(config.model.path or ""), pieces)
    graph = workload_graph(workload)
    return CapturedGraph(graph, time.perf_counter() - begin, from_cache=False), workload


def objective_metrics(problem: Problem, evaluation: Evaluation, n_devices: int) -> dict[str, float]:
    """Return the metrics of an objective other than latency by name.

    `evaluation` may have a computing tier after its `n_devices` devices.
    """
    if problem.objective == "latency":
        return {}
    if problem.objective in BY_WHOLE:
        value, bound, gap = _value_and_bound(problem, evaluation, n_devices)
        if problem.objective == "memory":
            memory_metrics = {"memory_bound_gib": bound / GIB, "memory_gap_pct": gap * 100}
            return memory_metrics if bound else {}
        energy_metrics = {"energy_bound_j": bound, "energy_gap_pct": gap * 100}
        return {"energy_j": value, **(energy_metrics if bound else {})}
    return {
        "load_ms": evaluation.load_s * 1e3,
        "load_bound_ms": evaluation.load_bound_s * 1e3,
        "load_gap_pct": evaluation.load_gap * 100,
    }


def with_proven_bound(
    evaluation: Evaluation, objective: str, curve: Sequence[Progress]
) -> Evaluation:
    """Return `evaluation` with the bound proved by a search of the same problem, if higher."""
    if not curve or objective in BY_WHOLE:
        return evaluation
    if objective == "throughput":
        proven_s = max(evaluation.load_bound_s, curve[-1].bound_s)
        return replace(evaluation, load_bound_s=proven_s)
    proven_s = max(evaluation.lower_bound_s, curve[-1].bound_s)
    return replace(evaluation, lower_bound_s=proven_s)


def _value_and_bound(
    problem: Problem, evaluation: Evaluation, n_devices: int
) -> tuple[float, float, float]:
    """Return the value of the objective in bytes or J, its lower bound, and the relative gap.

    With a computing tier there is no bound, and 0 is returned: any weight may lie there, and it
    counts as drawing no power.
    """
    bound, _ = bound_of(problem, evaluation.lower_bound_s)
    if n_devices < len(evaluation.devices):
        bound = 0.0
    value = float(max(use.peak_bytes for use in evaluation.devices[:n_devices]))
    if problem.objective == "energy":
        busy_s = np.array([use.load_s for use in evaluation.devices])
        used = np.array([use.operators > 0 for use in evaluation.devices])
        value = energy_j(powers_w(problem.topology), busy_s, used, evaluation.latency_s)
    return value, bound, max(0.0, value / bound - 1.0) if bound > 0 else 0.0


def objective_line(problem: Problem, evaluation: Evaluation, n_devices: int) -> str:
    """Return a line with the value and gap of an objective other than latency; empty for latency.

    `evaluation` may have a computing tier after its `n_devices` devices.
    """
    if problem.objective == "latency":
        return ""
    if problem.objective in BY_WHOLE:
        value, bound, gap = _value_and_bound(problem, evaluation, n_devices)
        unit = UNITS[problem.objective]
        unit_of = "on the fullest device" if unit == "B" else "an input"
        proven = f", lower bound {_shown(bound, unit)} (gap {gap:.1%})" if bound else ""
        return f"{_shown(value, unit)} {unit_of}{proven}"
    return (
        f"{format_s(evaluation.load_s)} on the busiest device or link, lower bound"
        f" {format_s(evaluation.load_bound_s)} (gap {evaluation.load_gap:.1%})"
    )


@contextmanager
def watched(*, shown: bool) -> Iterator[list[Progress]]:
    """Yield a list that a `mode=optimal` search inside the block fills with its progress.

    With `shown`, incumbent, bound and gap are also printed to stderr, about once a second. An
    interrupt that ended the search is always printed.
    """
    curve: list[Progress] = []
    told_s = 0.0

    def follow(progress: Progress) -> None:
        nonlocal told_s
        curve.append(progress)
        if progress.is_interrupted:
            _say(f"interrupted after {counted(progress.step, 'step')}: the best plan found so far")
        elif shown and progress.seconds - told_s >= _SHOWN_EVERY_S:
            told_s = progress.seconds
            _say(progress_text(progress))

    token = WATCHER.set(follow)
    try:
        yield curve
    finally:
        WATCHER.reset(token)


def _say(line: str) -> None:
    with suppress(OSError, ValueError):  # the reader of stderr may be gone
        sys.stderr.write(f"{line}\n")
        sys.stderr.flush()


def _shown(value: float, unit: str) -> str:
    if unit == "s":
        return format_s(value)
    return format_size(value) if unit == "B" else f"{value:.4g} J"


def progress_text(progress: Progress) -> str:
    """Return progress as text: ``after 3.1 s: 51.39 ms, bound 50.98 ms (work), gap 0.80%``."""
    bound = f"bound {_shown(progress.bound_s, progress.unit)} ({progress.bound_by})"
    if math.isinf(progress.best_s):
        return f"after {progress.seconds:.1f} s: no placement yet, {bound}"
    best = _shown(progress.best_s, progress.unit)
    return f"after {progress.seconds:.1f} s: {best}, {bound}, gap {progress.gap:.2%}"


def search_series(curve: tuple[Progress, ...]) -> dict[str, list[tuple[int, float]]]:
    """Return the incumbent's value by ms of search, as a series; empty without a search."""
    if not curve:
        return {}
    name, size = _SERIES[curve[-1].unit]
    points = {round(p.seconds * 1e3): p.best_s * size for p in curve if p.best_s < float("inf")}
    return {name: sorted(points.items())} if points else {}
