"""The steps of `vtrain`, with two numbers fitted to a tenth of its rows; and how plans rank.

    python -m benchmarks.truth.vtrain_calibrated --data FOLDER [--workloads N] [--rows]

Fitted are what that machine's host takes to start an operator, since most of these models are so
small that it decides, and the share of the rates of ``latency=kernels`` that devices and links
reach there. A step at the share e with launches of h takes 1 / e of one at all of the rates with
launches of e h: all else in it is computing and sending.
"""

import argparse
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.text_table import table
from benchmarks.truth import vtrain
from benchmarks.truth.row import HEADS, Row, summary
from benchmarks.truth.vtrain import FEW, Plan, plans

__all__ = ["NAME", "SOURCE", "Calibrated", "asked_for", "calibrated", "ranked", "rows"]

NAME = "vtrain_calibrated"
SOURCE = f"{vtrain.SOURCE}; two numbers are fitted to the tenth that is not held out"
_LAUNCHES_S = np.array([0, 15, 30, 45, 60]) * 1e-6
"""Launches at which steps are planned to fit; between them their times are interpolated."""
_STEPS = 241
"""Launches that are tried between the first and the last of these."""
_LEAST_PLANS = 4
"""Of a workload whose plans are ranked."""


@dataclass(frozen=True, slots=True)
class Calibrated:
    """What was fitted."""

    launch_s: float
    """Of the host, for an operator."""
    share: float
    """Of the rates of devices and links."""
    n_rows: int
    """That it was fitted to."""

    def step_s(self, plan: Plan) -> float:
        """Return the predicted time of a step.

        Raises:
            FxpartError: for a step that cannot be planned.

        """
        return plan.step_s(self.launch_s * self.share) / self.share


def calibrated(measured: Sequence[Plan]) -> Calibrated:
    """Return what explains the steps best: the least mean of relative errors.

    Raises:
        FxpartError: for a step that cannot be planned.

    """
    times = [[plan.step_s(float(launch_s)) for launch_s in _LAUNCHES_S] for plan in measured]
    tried = np.linspace(_LAUNCHES_S[0], _LAUNCHES_S[-1], _STEPS)
    ratios = np.array(
        [
            np.interp(tried, _LAUNCHES_S, of_plan) / (plan.iteration_ms / 1e3)
            for of_plan, plan in zip(times, measured, strict=True)
        ]
    )
    # The share with the least mean of |ratio / share - 1| is one of the ratios.
    errors = np.abs(ratios[None, :, :] / ratios[:, None, :] - 1).mean(axis=1)
    row, best = np.unravel_index(int(errors.argmin()), errors.shape)
    share = float(ratios[row, best])
    return Calibrated(float(tried[best]) / share, share, len(measured))


def rows(data: Path) -> Iterator[Row]:
    """Yield a row for each plan of some workloads.

    Raises:
        FileNotFoundError: without the file.

    """
    drawn = plans(data, FEW)
    print(f"{NAME}: {len(drawn)} of {len(plans(data))} rows, of workloads drawn by chance")
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


def asked_for(data: Path, predicted: Sequence[Row]) -> str:
    """Return how plans rank by what is predicted, and by what was measured, in words."""
    return ranked({plan.label: plan for plan in plans(data)}, predicted)


def ranked(by_label: Mapping[str, Plan], predicted: Sequence[Row]) -> str:
    """Return the rank correlations of predicted and measured times, in words.

    Of the plans of each workload with enough of them; and of all kinds of plan, by the mean over
    workloads of the logarithm of how much longer than the workload's mean they take.
    """
    of_workload: dict[str, list[Row]] = defaultdict(list)
    for row in predicted:
        of_workload[by_label[row.label].workload].append(row)
    each = [_spearman(of) for of in of_workload.values() if len(of) >= _LEAST_PLANS]
    relative: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for of in of_workload.values():
        logs = np.log([[row.predicted, row.measured] for row in of])
        for row, pair in zip(of, logs - logs.mean(axis=0), strict=True):
            relative[by_label[row.label].degrees].append(tuple(pair))
    if not each:
        return "no workload has enough plans to rank them"
    kinds = np.array([np.mean(pairs, axis=0) for pairs in relative.values()])
    return (
        f"rank correlation of the plans of a workload {np.median(each):.2f} in the median,"
        f" {min(each):.2f} to {max(each):.2f}, of {len(each)} workloads; of the {len(kinds)} kinds"
        f" of plan over all workloads {_rank_correlation(*kinds.T):.2f}"
    )


def _spearman(of: Sequence[Row]) -> float:
    return _rank_correlation([row.predicted for row in of], [row.measured for row in of])


def _rank_correlation(predicted: Sequence[float], measured: Sequence[float]) -> float:
    from scipy.stats import spearmanr

    return float(spearmanr(predicted, measured).statistic)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the errors without and with the fitted numbers, and how plans rank."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.truth.vtrain_calibrated")
    parser.add_argument("--data", type=Path, required=True, help="folder of the published files")
    parser.add_argument("--workloads", type=int, help="only so many, drawn by chance")
    parser.add_argument("--rows", action="store_true", help="also print every row")
    asked = parser.parse_args(arguments)
    drawn = plans(asked.data, asked.workloads)
    by_label = {plan.label: plan for plan in drawn}
    parts = {
        "tables alone": list(vtrain.rows_of(drawn, lambda plan: plan.step_s())),
        "calibrated": list(_rows(drawn)),
    }
    parts["held out"] = [row for row in parts["calibrated"] if row.held_out]
    print(table(["vtrain", *HEADS], [[name, *summary(part)] for name, part in parts.items()]))
    for name in ("tables alone", "held out"):
        print(f"{name}: {ranked(by_label, parts[name])}")
    for row in parts["calibrated"] if asked.rows else ():
        print(f"{row.label:44} {row.predicted:8.1f} {row.measured:8.1f} {100 * row.error:+6.1f} %")


if __name__ == "__main__":
    main()
