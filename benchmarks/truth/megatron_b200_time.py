"""Times of training steps of Megatron-LM on eight B200s, beside the plans of `megatron_b200`.

One number is fitted, to half of the models and degrees: by how much longer products and attention
take than at an H100's share of the peak, 1.785, the median over the rows that are not held out. The
curves of ``b200`` in ``conf/latency/kernels.yaml`` have it.
"""

from collections.abc import Iterator
from pathlib import Path

from benchmarks.truth.megatron_b200 import planned_cases
from benchmarks.truth.megatron_steps import schedule_of
from benchmarks.truth.row import Row

__all__ = ["NAME", "SOURCE", "rows"]

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
