"""Times on one GPU: forwards and training steps of models that fxpart ships.

The measurements are those of `benchmarks.truth.single_gpu`, except the cases with autocast: when
they were measured, casts were made by fxpart's Python functions, which slow down the host.
`benchmarks.gpu.measure` now uses ``torch.autocast``.
"""

from collections.abc import Iterator
from pathlib import Path

from benchmarks.truth.row import Row
from benchmarks.truth.single_gpu import SOURCE, is_held_out, measured_cases, planned

__all__ = ["NAME", "SOURCE", "rows"]

NAME = "single_gpu_time"


def rows(_: Path) -> Iterator[Row]:
    """Yield a row for each case that was measured without autocast."""
    for case, measured in measured_cases():
        if any(override.startswith("model.autocast=") for override in case.overrides):
            continue
        predicted_ms = planned(case).evaluation.latency_s * 1e3
        yield Row(
            case.label, predicted_ms, measured["latency_ms"], "ms", held_out=is_held_out(case)
        )
