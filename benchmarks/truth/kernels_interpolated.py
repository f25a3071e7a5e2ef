"""Held-out kernels in 16 bits, compared with times interpolated between the other rows."""

from collections.abc import Iterator
from pathlib import Path

from benchmarks.truth.kernel_tables import DEVICES, FAMILIES, Kernels, read_kernels
from benchmarks.truth.row import Row
from fxpart.core.graph import FloatArray
from fxpart.cost.curves.tables import KINDS, Residuals

__all__ = ["NAME", "SOURCE", "rows"]

NAME = "kernels, by latency.tables"
SOURCE = "ai-dynamo/aiconfigurator, systems data (Apache-2.0), A100 and H100 SXM, 16 bits"


def rows(data: Path) -> Iterator[Row]:
    """Yield a row for each held-out kernel."""
    for prefix, device in DEVICES.items():
        for kind, name in KINDS.items():
            curve = getattr(FAMILIES[device.curves], name)
            kernels = read_kernels(data, prefix, kind, "bfloat16")
            predicted = curve.seconds(kernels.calls, kernels.rates)
            is_known = ~kernels.held_out
            known = kernels.calls.only(is_known)
            residuals = Residuals.of(known, kernels.seconds[is_known], predicted[is_known])
            yield from _held_out(kernels, predicted * residuals.factor(kernels.calls))


def _held_out(kernels: Kernels, predicted: FloatArray) -> Iterator[Row]:
    columns = (kernels.labels, predicted, kernels.seconds, kernels.held_out)
    for label, guess, seconds, held_out in zip(*columns, strict=True):
        if held_out:
            yield Row(label, 1e6 * float(guess), 1e6 * float(seconds), "us", held_out=True)
