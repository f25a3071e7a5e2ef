"""Time ``partition_graph`` of torch and of fxpart by graph family and size, and their growth.

Torch runs once for each size, in a fresh process with a time limit, until a size exceeds it.
Ours runs in this process on the same graphs, the best of three after one warm-up call, and on much
larger ones. Both times include everything that ``partition_graph`` does: sizes, search, the emitted
module, the DAG.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from benchmarks.static_case import Case
from benchmarks.text_table import table
from benchmarks.time_limit import OverLimitError, limited
from benchmarks.torch_child import TorchRun, family_case, run_torch
from benchmarks.torch_families import OPERATORS_PER_BLOCK
from benchmarks.torch_judge import make_judge
from benchmarks.two_sides import FXPART, Mode, Question, Side, prepare

__all__ = ["SERIES", "Series", "SpeedPlan", "compare_speed", "growth"]


@dataclass(frozen=True, slots=True)
class Series:
    """One graph family on a number of devices in one mode, and the first size for torch."""

    family: str
    devices: int
    mode: Mode
    first_blocks: int

    def __str__(self) -> str:
        """Return the name of the series in tables."""
        return f"{self.mode}, {self.family}, {self.devices} devices"


SERIES = (
    Series("chain", 4, "kl_based", 60),
    Series("residual", 2, "kl_based", 12),
    Series("residual", 4, "kl_based", 16),
    Series("inception", 4, "kl_based", 10),
    Series("transformer", 4, "kl_based", 4),
    Series("chain", 4, "cost_aware", 30),
    Series("residual", 2, "cost_aware", 7),
    Series("residual", 4, "cost_aware", 7),
    Series("inception", 4, "cost_aware", 5),
    Series("transformer", 4, "cost_aware", 2),
)


@dataclass(frozen=True, slots=True)
class SpeedPlan:
    """The series, sizes and time limits of a comparison."""

    limit_s: float
    """Torch gets no larger size once it takes longer."""
    large_operators: tuple[int, ...]
    """Sizes at which only ours runs."""
    series: tuple[Series, ...] = SERIES
    own_limit_s: float = 600.0
    """Ours gets no larger size once one run takes longer."""


@dataclass(frozen=True, slots=True)
class Point:
    """The measurements at one size of a series."""

    operators: int
    torch_s: float | None
    ours_s: float
    latency_ratio: float | None
    """Our predicted latency divided by torch's, evaluated by torch's functions."""


def growth(sizes: Sequence[int], times_s: Sequence[float], last: int = 4) -> float:
    """Return the exponent of a power law through the last points; NaN for fewer than two."""
    if len(sizes) < 2:
        return float("nan")
    slope, _ = np.polyfit(np.log(sizes[-last:]), np.log(times_s[-last:]), 1)
    return float(slope)


@dataclass(frozen=True, slots=True)
class OwnRun:
    """The time of our run and the partitioner with its answer, or an error."""

    seconds: float
    partitioner: object
    error: str = ""


def _time_ours(side: Side, case: Case, mode: Mode) -> OwnRun:
    """Return the best of three runs after a warm-up call."""
    best = float("inf")
    with torch.no_grad():
        for number in range(4):
            run, partitioner, _ = prepare(side, case, Question(mode))
            begin = time.perf_counter()
            try:
                run()
            except Exception as error:
                return OwnRun(float("nan"), None, f"{type(error).__name__}: {error}")
            seconds = time.perf_counter() - begin
            best = min(best, seconds) if number else best
            if seconds > 20:
                # Compiling takes far less than that: more runs would not change the result.
                return OwnRun(min(best, seconds), partitioner)
    return OwnRun(best, partitioner)


def _latency_ratio(case: Case, torch_run: TorchRun, our_run: OwnRun) -> float | None:
    """Return our latency over torch's; None if torch is invalid or too slow to evaluate."""
    if our_run.error:
        return None
    judge = make_judge(case)
    operators = set(case.operators)
    parts = our_run.partitioner.partitions  # type: ignore[attr-defined]  # either side's Partitioner
    ours = {node.name: part.partition_id for part in parts for node in part.nodes}
    devices = {part.partition_id: part.logical_device_ids for part in parts}
    try:
        with limited(30.0):
            torch_verdict = judge.verdict(torch_run.partition_of, torch_run.devices)
            our_verdict = judge.verdict(
                {name: ours[name] for name in ours if name in operators}, devices
            )
    except (OverLimitError, RecursionError):
        return None
    return our_verdict.latency_s / torch_verdict.latency_s if torch_verdict.valid else None


def _point(series: Series, blocks: int, torch_run: TorchRun | None, side: Side) -> Point:
    case = family_case(series.family, blocks, series.devices)
    our_run = _time_ours(side, case, series.mode)
    if our_run.error:
        print(f"  {series}, {len(case.operators)} operators: {our_run.error}", flush=True)
    ratio = _latency_ratio(case, torch_run, our_run) if torch_run is not None else None
    return Point(
        len(case.operators), torch_run.seconds if torch_run else None, our_run.seconds, ratio
    )


def _measure(series: Series, plan: SpeedPlan, side: Side) -> list[Point]:
    """Return the points of one series; sizes grow by a quarter until torch exceeds its limit."""
    points: list[Point] = []
    blocks = series.first_blocks
    while True:
        torch_run = run_torch(series.family, blocks, series.devices, series.mode, plan.limit_s)
        if torch_run is None or torch_run.error:
            break
        points.append(_point(series, blocks, torch_run, side))
        blocks = max(blocks + 1, round(blocks * 1.25))
    for operators in plan.large_operators:
        blocks = max(1, operators // OPERATORS_PER_BLOCK[series.family])
        if points and operators <= points[-1].operators:
            continue
        points.append(_point(series, blocks, None, side))
        if not points[-1].ours_s <= plan.own_limit_s:
            break
    return points


def _rows(points: list[Point]) -> list[list[str]]:
    rows = []
    for point in points:
        has_torch = point.torch_s is not None
        rows.append(
            [
                f"  {point.operators}",
                f"{point.torch_s:.3f}" if has_torch else "-",
                f"{point.ours_s:.4f}",
                f"{point.torch_s / point.ours_s:.0f}" if point.torch_s is not None else "-",
                "-" if point.latency_ratio is None else f"{point.latency_ratio:.4f}",
            ]
        )
    return rows


def _summary(series: Series, points: list[Point]) -> list[str]:
    """Return the row of the largest size that torch finished, with both exponents."""
    common = [point for point in points if point.torch_s is not None]
    finished = [point for point in points if math.isfinite(point.ours_s)]
    our_growth = growth([p.operators for p in finished], [p.ours_s for p in finished])
    if not common:
        return [str(series), "-", "-", "-", "-", "-", f"{our_growth:.2f}"]
    last = common[-1]
    torch_s = [point.torch_s or 0.0 for point in common]
    return [
        str(series),
        str(last.operators),
        f"{torch_s[-1]:.2f}",
        f"{last.ours_s:.4f}",
        f"{torch_s[-1] / last.ours_s:.0f}",
        f"{growth([p.operators for p in common], torch_s):.2f}",
        f"{our_growth:.2f}",
    ]


def compare_speed(plan: SpeedPlan, ours: Side = FXPART) -> int:
    """Print a table for each series when it is done, and one of the largest sizes.

    Returns:
        The number of sizes at which ours fails, or predicts a higher latency than torch.

    """
    rows = []
    wrong = 0
    for series in plan.series:
        points = _measure(series, plan, ours)
        heads = ["  operators", "torch s", "fxpart s", "times faster", "latency, fxpart by torch"]
        print(f"{series}\n{table(heads, _rows(points))}", flush=True)
        rows.append(_summary(series, points))
        wrong += sum((point.latency_ratio or 0.0) > 1 + 1e-9 for point in points)
        wrong += sum(math.isnan(point.ours_s) for point in points)
    heads = [
        "largest that torch finished", "operators", "torch s", "fxpart s", "times faster",
        "torch grows as n^", "fxpart grows as n^",
    ]  # fmt: skip
    print(f"limit for one run of torch: {plan.limit_s:g} s\n{table(heads, rows)}", flush=True)
    return wrong
