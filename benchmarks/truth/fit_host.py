"""Fit the time in which a host launches an operator in eager mode (`host_launch_s`).

    python -m benchmarks.truth.fit_host --data FOLDER [--markdown]

prints for several launch times how well eager runs are predicted: litgpt's decodes on an A100
(`finetune_time`) and fxpart's own runs on an H100 (`single_gpu_time`). Only runs that the host
limits are counted: those that the longest of these launches slows down by more than a tenth
compared with the shortest. Half of them, by their labels, decide: fewest outside `_NEAR`, then the
least error. Hosts differ, also from run to run: one time stands for all that were not measured.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks.text_table import markdown, table
from benchmarks.truth import finetune_time, single_gpu, single_gpu_time
from benchmarks.truth.measured import add_data_argument, skipped_without_files
from benchmarks.truth.planned_run import ALSO
from benchmarks.truth.row import Row

__all__ = ["errors_of", "limited_by_host", "main"]

_LAUNCHES_US = (20, 23, 26, 29, 32, 35)
_NEAR = (0.75, 1.33)
"""Ratios of predicted to measured that count as near."""
_HEADS = ("launch us", "fitted: far", "mean %", "held out: far", "mean %")
_LEAST_CHANGE = 0.1
_COMPILED = ("compile", "chunked", "checkpointing (block)", "in backward")
"""In the labels of runs with ``runtime=compiled``, which the host hardly limits."""


def _rows(data: Path, launch_us: float) -> list[Row]:
    """Return the eager runs of both sets, planned with one launch time."""
    single_gpu.planned.cache_clear()
    ALSO[:] = [f"runtime.host_launch_s={launch_us * 1e-6}"]
    try:
        rows = [*finetune_time.rows(data), *single_gpu_time.rows(data)]
    finally:
        ALSO.clear()
    return [row for row in rows if not any(word in row.label for word in _COMPILED)]


def limited_by_host(fast: Sequence[Row], slow: Sequence[Row]) -> list[int]:
    """Return the positions of the runs that the launch time changes, between two of these times."""
    return [
        index
        for index, (row, slower) in enumerate(zip(fast, slow, strict=True))
        if abs(np.log(slower.predicted / row.predicted)) > np.log(1 + _LEAST_CHANGE)
    ]


def errors_of(rows: Sequence[Row]) -> tuple[int, float]:
    """Return how many are outside `_NEAR`, and the mean absolute log of predicted to measured."""
    ratios = np.array([row.predicted / row.measured for row in rows])
    low, high = _NEAR
    return int(((ratios < low) | (ratios > high)).sum()), float(np.abs(np.log(ratios)).mean())


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the errors by launch time, and the time of least error."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.truth.fit_host")
    add_data_argument(parser)
    parser.add_argument("--markdown", action="store_true", help="print the table in Markdown")
    options = parser.parse_args(arguments)
    with skipped_without_files("fit_host"):
        runs = [_rows(options.data, launch_us) for launch_us in _LAUNCHES_US]
        counted = limited_by_host(runs[0], runs[-1])
        halves = [[i for i in counted if runs[0][i].held_out == other] for other in (False, True)]
        errors = [[errors_of([rows[index] for index in half]) for half in halves] for rows in runs]
        lines = [
            [
                str(launch_us),
                *(text for outside, mean in both for text in (str(outside), f"{100 * mean:.1f}")),
            ]
            for launch_us, both in zip(_LAUNCHES_US, errors, strict=True)
        ]
        print((markdown if options.markdown else table)(_HEADS, lines))
        best_us = min(zip(errors, _LAUNCHES_US, strict=True))[1]
        print(f"{len(counted)} runs, {len(halves[1])} of them held out: {best_us} us")


if __name__ == "__main__":
    main()
