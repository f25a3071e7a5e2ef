"""Times of Megatron-LM's training steps on eight B200s, compared with the plans of `megatron_b200`.

One number is fitted, to half of the combinations of model and degrees: products and attention reach
0.63 of the rate of kernels measured one by one, the median over the rows not held out. It is the
`sustained_share` of ``b200`` in ``conf/latency/kernels.yaml``.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median

from benchmarks.truth.megatron_b200 import planned_cases
from benchmarks.truth.megatron_steps import schedule_of
from benchmarks.truth.row import Row

__all__ = ["NAME", "SOURCE", "fit_note", "rows"]

NAME = "megatron_b200_time"
SOURCE = "MooreThreads/SimuMax docs/b200 (Apache-2.0), Megatron-LM on eight B200, time of a step"


def rows(data: Path) -> Iterator[Row]:
    """Yield a row for each case.

    Raises:
        FileNotFoundError: if `data` lacks the file.

    """
    for case, result in planned_cases(data):
        predicted_ms = schedule_of(result).step_s * 1e3
        yield Row(case.name, predicted_ms, case.step_ms, "ms", held_out=case.is_held_out)


def fit_note(_: Path, rows_measured: Sequence[Row]) -> str:
    """Return a sentence with the value of the fitted number that the rows not held out imply."""
    ratios = [row.measured / row.predicted for row in rows_measured if not row.held_out]
    if not ratios:
        return "no row is fitted to"
    return f"the {len(ratios)} rows not held out imply {median(ratios):.3f} times these times"
