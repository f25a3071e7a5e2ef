"""Predict the steps of `vtrain` with five numbers fitted to a tenth of its rows, and rank plans.

    python -m benchmarks.truth.vtrain_calibrated --data FOLDER [--workloads N] [--rows]

`Coefficients` says what is fitted. Kernels of products and collectives, all-reduces of gradients
and updates keep the times of ``latency=kernels``. As a set of ``python -m benchmarks.truth`` it
predicts a few workloads with the numbers below, which the command above prints for all rows.
"""

import argparse
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from benchmarks.text_table import table
from benchmarks.truth import vtrain
from benchmarks.truth.measured import add_data_argument, skipped_without_files
from benchmarks.truth.row import HEADS, Row, summary
from benchmarks.truth.vtrain import FEW, Plan, plans
from benchmarks.truth.vtrain_parts import Coefficients, Parts, parts_of
from fxpart.core.graph import FloatArray

__all__ = ["FITTED", "NAME", "SOURCE", "Sample", "fit_note", "fitted", "ranked", "rows"]

NAME = "vtrain_calibrated"
SOURCE = f"{vtrain.SOURCE}; five numbers are fitted to the tenth that is not held out"
FITTED = Coefficients(29.5e-6, 0.110, 18.8, 17.4, 1478e-6)
"""Fitted to all rows that are not held out, 77 of 732."""
_SPANS = (
    (1e-6, 25e-6, 100e-6),
    (0.0, 0.5, 3.0),
    (0.3, 3.0, 30.0),
    (0.0, 10.0, 60.0),
    (0.0, 100e-6, 5000e-6),
)
"""Least value, start and largest value of each of `Coefficients`."""
_LARGE_ERROR = 0.05
"""Errors of the logarithm beyond this count linearly, not squared."""
_MOST_TRIES = 60
_LEAST_PLANS = 4
"""Plans that a workload needs to be ranked."""


class Sample(NamedTuple):
    """A measured step."""

    parts: Parts
    microbatches: int
    measured_s: float


def fitted(samples: Sequence[Sample]) -> Coefficients:
    """Return the coefficients with the least robust sum of squared logarithmic errors."""
    from scipy.optimize import least_squares

    least, start, largest = np.array(_SPANS).T
    measured_s = np.array([sample.measured_s for sample in samples])

    def coefficients(shares: FloatArray) -> Coefficients:
        return Coefficients(*(least + shares * (largest - least)).tolist())

    def errors(shares: FloatArray) -> FloatArray:
        tried = coefficients(shares)
        steps_s = [sample.parts.step_s(tried, sample.microbatches) for sample in samples]
        logs: FloatArray = np.log(np.array(steps_s) / measured_s)
        return logs

    solution = least_squares(
        errors,
        (start - least) / (largest - least),
        bounds=(0, 1),
        loss="soft_l1",
        f_scale=_LARGE_ERROR,
        diff_step=1e-4,
        max_nfev=_MOST_TRIES,
    )
    return coefficients(solution.x)


def rows(data: Path) -> Iterator[Row]:
    """Yield a row for each plan of some workloads.

    Raises:
        FileNotFoundError: if `data` lacks the file.

    """
    drawn = plans(data, FEW)
    print(f"{NAME}: {len(drawn)} of {len(plans(data))} rows, of random workloads")
    yield from _rows(drawn, FITTED)


def _rows(drawn: Sequence[Plan], coefficients: Coefficients) -> Iterator[Row]:
    def step_s(plan: Plan) -> float:
        return parts_of(plan).step_s(coefficients, plan.microbatches)

    yield from vtrain.rows_of(drawn, step_s, is_fitted=True)


def _calibrated(drawn: Sequence[Plan]) -> Iterator[Row]:
    """Yield the rows predicted after a fit to those that are not held out; print the fit."""
    fitted_to = [plan for plan in drawn if not plan.is_held_out]
    if not fitted_to:
        print(f"{NAME}: no row is fitted to")
        return
    samples = [
        Sample(parts_of(plan), plan.microbatches, plan.iteration_ms / 1e3) for plan in fitted_to
    ]
    fit = fitted(samples)
    print(
        f"{NAME}: {len(samples)} rows ask for launches of {fit.launch_s * 1e6:.1f} us,"
        f" {fit.elementwise:.3f} of the elementwise kernels' time, {fit.loss:.1f} times the loss,"
        f" {fit.softmax_launches:.1f} more launches of a softmax that is not fused,"
        f" and {fit.transfer_s * 1e6:.0f} us for a transfer"
    )
    yield from _rows(drawn, fit)


def fit_note(data: Path, predicted: Sequence[Row]) -> str:
    """Return a sentence on how predicted and measured times rank the plans."""
    return ranked({plan.label: plan for plan in plans(data)}, predicted)


def ranked(by_label: Mapping[str, Plan], predicted: Sequence[Row]) -> str:
    """Return a sentence with the rank correlations of predicted and measured times.

    They are computed over the plans of each workload that has enough of them, and over the kinds of
    plan: a kind's time is the mean over workloads of the logarithm of its time relative to the
    workload's mean.
    """
    rows_by_workload: dict[str, list[Row]] = defaultdict(list)
    for row in predicted:
        rows_by_workload[by_label[row.label].workload].append(row)
    groups = [group for group in rows_by_workload.values() if len(group) >= _LEAST_PLANS]
    by_group = [_spearman(group) for group in groups]
    relative: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for workload_rows in rows_by_workload.values():
        logs = np.log([[row.predicted, row.measured] for row in workload_rows])
        for row, pair in zip(workload_rows, logs - logs.mean(axis=0), strict=True):
            relative[by_label[row.label].degrees].append(tuple(pair))
    if not by_group:
        return "no workload has enough plans to rank them"
    kinds = np.array([np.mean(pairs, axis=0) for pairs in relative.values()])
    return (
        f"rank correlation of the plans of a workload {np.median(by_group):.2f} in the median,"
        f" {min(by_group):.2f} to {max(by_group):.2f}, of {len(by_group)} workloads;"
        f" of the {len(kinds)} kinds of plan over all workloads {_rank_correlation(*kinds.T):.2f}"
    )


def _spearman(rows: Sequence[Row]) -> float:
    return _rank_correlation([row.predicted for row in rows], [row.measured for row in rows])


def _rank_correlation(predicted: Sequence[float], measured: Sequence[float]) -> float:
    from scipy.stats import spearmanr

    return float(spearmanr(predicted, measured).statistic)


@skipped_without_files("vtrain_calibrated")
def main(arguments: Sequence[str] | None = None) -> None:
    """Print the errors without and with the fitted numbers, and the rank correlations."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.truth.vtrain_calibrated")
    add_data_argument(parser)
    parser.add_argument("--workloads", type=int, help="use N random workloads only")
    parser.add_argument("--rows", action="store_true", help="also print every row")
    options = parser.parse_args(arguments)
    drawn = plans(options.data, options.workloads)
    by_label = {plan.label: plan for plan in drawn}
    parts = {
        "tables alone": list(vtrain.rows_of(drawn, lambda plan: plan.step_s())),
        "calibrated": list(_calibrated(drawn)),
    }
    parts["held out"] = [row for row in parts["calibrated"] if row.held_out]
    print(table(["vtrain", *HEADS], [[name, *summary(part)] for name, part in parts.items()]))
    for name in ("tables alone", "held out"):
        print(f"{name}: {ranked(by_label, parts[name])}")
    for row in parts["calibrated"] if options.rows else ():
        print(f"{row.label:44} {row.predicted:8.1f} {row.measured:8.1f} {100 * row.error:+6.1f} %")


if __name__ == "__main__":
    main()
