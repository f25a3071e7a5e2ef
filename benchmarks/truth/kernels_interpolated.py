"""Held-out kernels in 16 bits, compared with times interpolated between the other rows."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from benchmarks.truth.kernel_tables import DEVICES, FAMILIES, Curve, Kernels, read_kernels
from benchmarks.truth.row import Row
from fxpart.cost.curves.tables import KINDS, Residuals

__all__ = ["NAME", "SOURCE", "interpolated_rows", "rows"]

NAME = "kernels, by latency.tables"
SOURCE = "ai-dynamo/aiconfigurator, systems data (Apache-2.0), A100 and H100 SXM, 16 bits"


def rows(data: Path) -> Iterator[Row]:
    """Yield a row for each held-out kernel."""
    for prefix, device in DEVICES.items():
        for kind, name in KINDS.items():
            kernels = read_kernels(data, prefix, kind, "bfloat16")
            yield from interpolated_rows(kernels, getattr(FAMILIES[device.curves], name))


def interpolated_rows(kernels: Kernels, curve: Curve) -> Iterator[Row]:
    """Yield a row for each held-out kernel: `curve`, corrected by those that are not held out."""
    predicted = curve.seconds(kernels.calls, kernels.rates)
    known = np.flatnonzero(~kernels.held_out)
    residuals = Residuals.of(kernels.calls.only(known), kernels.seconds[known], predicted[known])
    predicted = predicted * residuals.factor(kernels.calls)
    columns = (kernels.labels, predicted, kernels.seconds, kernels.held_out)
    for label, guess, seconds, held_out in zip(*columns, strict=True):
        if held_out:
            yield Row(label, 1e6 * float(guess), 1e6 * float(seconds), "us", held_out=True)
