"""Times on one GPU: forwards and training steps of models that fxpart ships.

The measurements are those of `benchmarks.truth.single_gpu`, except GPT-2 XL with autocast: when it
was measured, casts were made by fxpart's Python functions, which slow down the host.
`benchmarks.gpu.measure` now uses ``torch.autocast``.
"""

from collections.abc import Iterator
from pathlib import Path

from benchmarks.truth.measured import is_in_host_fit
from benchmarks.truth.row import Row
from benchmarks.truth.single_gpu import SOURCE, is_held_out, measured_cases, planned

__all__ = ["NAME", "SOURCE", "rows"]

NAME = "single_gpu_time"
_SLOW_CASTS = "gpt2_xl training, batch 2 autocast=bfloat16"


def rows(_: Path) -> Iterator[Row]:
    """Yield a row for each case."""
    for case, measured in measured_cases():
        if case.label == _SLOW_CASTS:
            continue
        predicted_ms = planned(case).evaluation.latency_s * 1e3
        held_out = is_held_out(case) and not is_in_host_fit(case.label)
        yield Row(case.label, predicted_ms, measured["latency_ms"], "ms", held_out=held_out)
