"""Predict the steps of `vtrain` with two numbers fitted to a tenth of its rows, and rank plans.

    python -m benchmarks.truth.vtrain_calibrated --data FOLDER [--workloads N] [--rows]

Fitted are the launch time of that machine's host, which dominates since most of these models are
small, and the share of the rates of ``latency=kernels`` that its devices and links reach. A step at
share e with launch time h takes 1 / e times as long as one at the full rates with launch time e h,
since the rest of it is computation and transfers.
"""

import argparse
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.text_table import table
from benchmarks.truth import vtrain
from benchmarks.truth.measured import add_data_argument, skipped_without_files
from benchmarks.truth.row import HEADS, Row, summary
from benchmarks.truth.vtrain import FEW, Plan, plans

__all__ = ["NAME", "SOURCE", "Calibrated", "calibrated", "fit_note", "ranked", "rows"]

NAME = "vtrain_calibrated"
SOURCE = f"{vtrain.SOURCE}; two numbers are fitted to the tenth that is not held out"
_LAUNCHES_S = np.array([0, 15, 30, 45, 60]) * 1e-6
"""Launch times at which steps are planned; times between them are interpolated."""
_STEPS = 241
"""Launch times tried, evenly spaced over `_LAUNCHES_S`."""
_LEAST_PLANS = 4
"""Plans that a workload needs to be ranked."""


@dataclass(frozen=True, slots=True)
class Calibrated:
    """The fitted numbers."""

    launch_s: float
    """Time of the host to launch an operator."""
    share: float
    """Share of the rates of devices and links that is reached."""
    n_rows: int
    """Rows that the numbers were fitted to."""

    def step_s(self, plan: Plan) -> float:
        """Return the predicted time of a step.

        Raises:
            FxpartError: if the step cannot be planned.

        """
        return plan.step_s(self.launch_s * self.share) / self.share


def calibrated(measured: Sequence[Plan]) -> Calibrated:
    """Return the numbers with the least mean relative error over the steps.

    Raises:
        FxpartError: if a step cannot be planned.

    """
    times = [[plan.step_s(float(launch_s)) for launch_s in _LAUNCHES_S] for plan in measured]
    launches_s = np.linspace(_LAUNCHES_S[0], _LAUNCHES_S[-1], _STEPS)
    ratios = np.array(
        [
            np.interp(launches_s, _LAUNCHES_S, plan_times) / (plan.iteration_ms / 1e3)
            for plan_times, plan in zip(times, measured, strict=True)
        ]
    )
    # The share with the least mean of |ratio / share - 1| is one of the ratios.
    errors = np.abs(ratios[None, :, :] / ratios[:, None, :] - 1).mean(axis=1)
    row, best = np.unravel_index(int(errors.argmin()), errors.shape)
    share = float(ratios[row, best])
    return Calibrated(float(launches_s[best]) / share, share, len(measured))


def rows(data: Path) -> Iterator[Row]:
    """Yield a row for each plan of some workloads.

    Raises:
        FileNotFoundError: if `data` lacks the file.

    """
    drawn = plans(data, FEW)
    print(f"{NAME}: {len(drawn)} of {len(plans(data))} rows, of random workloads")
    yield from _rows(drawn)


def _rows(drawn: Sequence[Plan]) -> Iterator[Row]:
    fitted_to = [plan for plan in drawn if not plan.is_held_out]
    if not fitted_to:
        print(f"{NAME}: no row is fitted to")
        return
    fit = calibrated(fitted_to)
    print(
        f"{NAME}: {fit.n_rows} rows ask for launches of {fit.launch_s * 1e6:.0f} us and"
        f" {fit.share:.2f} of the kernels' rates"
    )
    yield from vtrain.rows_of(drawn, fit.step_s, is_fitted=True)


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
        "calibrated": list(_rows(drawn)),
    }
    parts["held out"] = [row for row in parts["calibrated"] if row.held_out]
    print(table(["vtrain", *HEADS], [[name, *summary(part)] for name, part in parts.items()]))
    for name in ("tables alone", "held out"):
        print(f"{name}: {ranked(by_label, parts[name])}")
    for row in parts["calibrated"] if options.rows else ():
        print(f"{row.label:44} {row.predicted:8.1f} {row.measured:8.1f} {100 * row.error:+6.1f} %")


if __name__ == "__main__":
    main()
