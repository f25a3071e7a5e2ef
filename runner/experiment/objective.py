"""What a search makes small, the published problems that say it in two ways, and how it goes on."""

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from fxpart.capture.captured import CapturedGraph
from fxpart.core.workload import Workload, workload_graph
from fxpart.cost.evaluation import Evaluation
from fxpart.cost.problem import OBJECTIVES
from fxpart.errors import SpecError, nearest_names
from fxpart.placement.optimal.mode import WATCHER, Progress
from runner.config.sections import Config
from runner.output.units import format_s

__all__ = [
    "check_objective",
    "load_line",
    "load_metrics",
    "published_graph",
    "search_series",
    "watched",
    "with_proven_bound",
]

_SHOWN_EVERY_S = 1.0


def check_objective(config: Config) -> None:
    """Refuse an objective that does not exist, and what a published problem has no meaning for.

    Raises:
        SpecError: with what to write instead.

    """
    if config.objective not in OBJECTIVES:
        raise SpecError(
            f"objective={config.objective} does not exist;"
            f" {nearest_names(config.objective, OBJECTIVES)}"
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
                f"{key}={value} is for models, model=workload has a problem whose times are given;"
                f" use {key}={use}"
            )


def published_graph(config: Config) -> tuple[CapturedGraph, Workload]:
    """Return the published problem of `config.model.path`, as a graph and as it is.

    With ``objective=latency`` an accelerator holds one piece, which runs whole.

    Raises:
        FxpartError: when the file is no such problem.

    """
    from fxpart.capture.models.workload import read_workload

    begin = time.perf_counter()
    pieces = 1 if config.objective == "latency" else None
    workload = read_workload(Path(config.model.path or ""), pieces)
    graph = workload_graph(workload)
    return CapturedGraph(graph, time.perf_counter() - begin, from_cache=False), workload


def load_metrics(evaluation: Evaluation) -> dict[str, float]:
    """Return the metrics of the largest load by name."""
    return {
        "load_ms": evaluation.load_s * 1e3,
        "load_bound_ms": evaluation.load_bound_s * 1e3,
        "load_gap_pct": evaluation.load_gap * 100,
    }


def with_proven_bound(
    evaluation: Evaluation, objective: str, curve: Sequence[Progress]
) -> Evaluation:
    """Return an evaluation with the bound that a search of the same problem proved, if higher."""
    if not curve:
        return evaluation
    if objective == "throughput":
        proven_s = max(evaluation.load_bound_s, curve[-1].bound_s)
        return replace(evaluation, load_bound_s=proven_s)
    proven_s = max(evaluation.lower_bound_s, curve[-1].bound_s)
    return replace(evaluation, lower_bound_s=proven_s)


def load_line(evaluation: Evaluation) -> str:
    """Return the largest load and how far it is above its bound."""
    return (
        f"{format_s(evaluation.load_s)} on the busiest device or link, lower bound"
        f" {format_s(evaluation.load_bound_s)} (gap {evaluation.load_gap:.1%})"
    )


@contextmanager
def watched(*, shown: bool) -> Iterator[list[Progress]]:
    """Give a list that a search by `mode=optimal` inside fills with how it goes on.

    With `shown`, best, bound and gap are told on stderr, about once a second.
    """
    curve: list[Progress] = []
    told_s = 0.0

    def follow(progress: Progress) -> None:
        nonlocal told_s
        curve.append(progress)
        if shown and progress.seconds - told_s >= _SHOWN_EVERY_S:
            told_s = progress.seconds
            with suppress(OSError, ValueError):  # the reader of stderr may be gone
                sys.stderr.write(f"{progress_text(progress)}\n")
                sys.stderr.flush()

    token = WATCHER.set(follow)
    try:
        yield curve
    finally:
        WATCHER.reset(token)


def progress_text(progress: Progress) -> str:
    """Return such as ``after 3.1 s: 51.39 ms, bound 50.98 ms (work), gap 0.80%``."""
    return (
        f"after {progress.seconds:.1f} s: {format_s(progress.best_s)}, bound"
        f" {format_s(progress.bound_s)} ({progress.bound_by}), gap {progress.gap:.2%}"
    )


def search_series(curve: tuple[Progress, ...]) -> dict[str, list[tuple[int, float]]]:
    """Return the best after each ms of a search, in ms; nothing where nothing was searched."""
    points = {round(p.seconds * 1e3): p.best_s * 1e3 for p in curve if p.best_s < float("inf")}
    return {"search_best_ms": sorted(points.items())} if points else {}
