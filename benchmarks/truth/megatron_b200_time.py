"""Times of training steps of Megatron-LM on eight B200s, beside the plans of `megatron_b200`.

One number is fitted, to half of the models and degrees: by how much longer products and attention
take than at an H100's share of the peak, 1.785, the median over the rows that are not held out. The
curves of ``b200`` in ``conf/latency/kernels.yaml`` have it.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median

from benchmarks.truth.megatron_b200 import planned_cases
from benchmarks.truth.megatron_steps import schedule_of
from benchmarks.truth.row import Row

__all__ = ["NAME", "SOURCE", "asked_for", "rows"]

NAME = "megatron_b200_time"
SOURCE = "MooreThreads/SimuMax docs/b200 (Apache-2.0), Megatron-LM on eight B200, time of a step"


def rows(data: Path) -> Iterator[Row]:
    """Yield a row for each case.

    Raises:
        FileNotFoundError: without the file.

    """
    for case, result in planned_cases(data):
        predicted_ms = schedule_of(result).step_s * 1e3
        yield Row(case.name, predicted_ms, case.step_ms, "ms", held_out=case.is_held_out)


def asked_for(_: Path, rows_measured: Sequence[Row]) -> str:
    """Return what the rows that are not held out ask of the fitted number, in words."""
    ratios = [row.measured / row.predicted for row in rows_measured if not row.held_out]
    if not ratios:
        return "no row is fitted to"
    return (
        f"the {len(ratios)} rows that are not held out ask for {median(ratios):.3f} of these times"
    )
