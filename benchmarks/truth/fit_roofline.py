"""Fit the shares of the peaks that a roofline uses (`efficiency` in conf/accelerator) to kernels.

    python -m benchmarks.truth.fit_roofline --data FOLDER [--markdown]

prints the shares by device, kind of operator and dtype. Long kernels decide a share: those whose
ideal time, at the peak that bounds them, is at least `_LONG` times the overhead of an operator. The
share is the median of ideal over measured time without that overhead, weighted by the square root
of the measured time, as in `fxpart.cost.fit`. Kernels were measured one by one: what products and
attention in 16 bits reach is then multiplied by the part of it that long runs sustain under the
power limit (`sustained_share` in conf/latency/kernels.yaml). Few convolutions are long: theirs is
the share of least error of the whole roofline on all of them, with the same weights.

Half of the rows are held out. Errors are those of the whole roofline on them, before that
multiplication; *flat* is 0.7 of FLOP/s, of all scores of attention whatever its mask, and 0.8 of
memory bandwidth. Devices whose tables are not installed are left out.
"""

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from benchmarks.text_table import markdown, table
from benchmarks.truth.kernel_tables import (
    DEVICES,
    FAMILIES,
    INSTALLED_DEVICES,
    Kernels,
    read_installed,
    read_kernels,
)
from benchmarks.truth.measured import add_data_argument, skipped_without_files
from benchmarks.truth.own_kernels import convolutions, float32_products
from fxpart.core.graph import FloatArray
from fxpart.core.topology import DeviceSpec
from fxpart.cost.curves.attention import Attentions
from fxpart.cost.curves.gemm import Products
from fxpart.cost.roofline import BANDWIDTH_SHARE, CAUSAL_WORK, COMPUTE_SHARE

__all__ = [
    "Measured",
    "Sample",
    "Shares",
    "fitted_share",
    "lines_of",
    "long_sample",
    "main",
    "measured_kernels",
    "share_of_least_error",
]

_OVERHEAD_S = 5e-6
"""As in ``conf/latency/roofline.yaml``."""
_LONG = 20
_OWN = "h100_sxm"
"""The device whose convolutions and float32 products fxpart measured."""
_BF16, _CONVOLUTION = "bfloat16", "convolution"


class Measured(NamedTuple):
    """Measured kernels of one kind, dtype and device. Arrays have the same length."""

    device: DeviceSpec
    kind: str
    """One of `fxpart.core.efficiency.COMPUTING`, or ``memory`` for single tokens."""
    dtype: str
    flops: FloatArray
    """As a graph counts them: all scores of attention, whatever its mask."""
    computed: FloatArray
    """The share of these FLOPs that the kernel computes."""
    moved_bytes: FloatArray
    seconds: FloatArray
    held_out: npt.NDArray[np.bool_]

    @property
    def ideal_s(self) -> tuple[FloatArray, FloatArray]:
        """The times at peak FLOP/s and at peak memory bandwidth."""
        computed = self.flops * self.computed
        bandwidth = self.device.memory_bandwidth_bytes_per_s
        return computed / self.device.rate_for(self.dtype), self.moved_bytes / bandwidth

    @property
    def is_long(self) -> npt.NDArray[np.bool_]:
        """Which kernels decide a share."""
        return np.maximum(*self.ideal_s) >= _LONG * _OVERHEAD_S

    @property
    def sustained(self) -> float:
        """The share of the measured FLOP/s that long runs sustain."""
        is_limited = self.dtype == _BF16 and self.kind != _CONVOLUTION
        return FAMILIES[self.device.curves].sustained_share if is_limited else 1.0


class Shares(NamedTuple):
    """Shares of the peaks that a roofline uses."""

    compute: FloatArray | float
    memory: float

    def errors(self, measured: Measured) -> FloatArray:
        """Return the relative error of each row."""
        computing_s, moving_s = measured.ideal_s
        predicted_s = _OVERHEAD_S + np.maximum(computing_s / self.compute, moving_s / self.memory)
        errors: FloatArray = predicted_s / measured.seconds - 1
        return errors


class Sample(NamedTuple):
    """Long kernels that compute, or that move bytes."""

    shares: FloatArray
    """Ideal over measured time."""
    weights: FloatArray


def long_sample(measured: Measured, *, computes: bool) -> Sample:
    """Return the long kernels bound by computing, or else by memory, that are not held out."""
    computing_s, moving_s = measured.ideal_s
    ideal_s = np.maximum(computing_s, moving_s)
    chosen = ~measured.held_out & measured.is_long & ((computing_s >= moving_s) == computes)
    seconds = measured.seconds[chosen]
    return Sample(ideal_s[chosen] / (seconds - _OVERHEAD_S), np.sqrt(seconds))


def fitted_share(samples: Sequence[Sample]) -> tuple[float, int]:
    """Return the weighted median of the shares, where each sample counts the same, and the rows."""
    shares = np.concatenate([sample.shares for sample in samples])
    weights = np.concatenate([sample.weights / sample.weights.sum() for sample in samples])
    order = np.argsort(shares, kind="stable")
    total = np.cumsum(weights[order])
    middle = int(np.searchsorted(total, total[-1] / 2))
    return float(shares[order][middle]), len(shares)


def share_of_least_error(measured: Measured, memory: float) -> tuple[float, int]:
    """Return the share of FLOP/s with which a roofline is nearest to the rows that are fitted to.

    Its error is the mean absolute logarithm of predicted over measured time, weighted by the square
    root of the measured time. The second number is that of the rows.
    """
    rows = ~measured.held_out
    computing_s, _ = measured.ideal_s
    candidates = np.unique(np.minimum(computing_s / (measured.seconds - _OVERHEAD_S), 1.0)[rows])
    weights = np.sqrt(measured.seconds[rows])

    def error(share: float) -> float:
        ratios = 1 + Shares(share, memory).errors(measured)[rows]
        return float(np.average(np.abs(np.log(ratios)), weights=weights))

    return min(candidates[candidates > 0].tolist(), key=error), int(rows.sum())


def measured_kernels(data: Path) -> Iterator[list[Measured]]:
    """Yield the kernels of each device.

    Raises:
        FileNotFoundError: if `data` has no tables of A100 and H100.

    """
    for prefix, device in DEVICES.items():
        of_device = [
            _from_table(device, kind, read_kernels(data, prefix, table_kind, _BF16))
            for table_kind, kind in _TABLES.items()
        ]
        yield [*of_device, *(_own(device) if prefix == _OWN else [])]
    with skipped_without_files(", ".join(INSTALLED_DEVICES)):
        for name, device in INSTALLED_DEVICES.items():
            yield [
                _from_table(device, kind, read_installed(name, table_kind))
                for table_kind, kind in _TABLES.items()
            ]


_TABLES = {"gemm": "gemm", "context_attention": "attention", "generation_attention": "memory"}


def _from_table(device: DeviceSpec, kind: str, kernels: Kernels) -> Measured:
    calls = kernels.calls
    if isinstance(calls, Products):
        counted, rows = _of_products(calls), np.ones(len(kernels.seconds), dtype=np.bool_)
    else:
        # A graph does not say that attention has a window.
        counted, rows = _of_attentions(calls), calls.window == 0
    columns = (*counted, kernels.seconds, kernels.held_out)
    return Measured(device, kind, _BF16, *(column[rows] for column in columns))


def _of_products(calls: Products) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Return the FLOPs of products, the share of them that is computed, and the bytes."""
    batch, m, n, k, operand_bytes, result_bytes = calls
    operands = (m * k + k * n) * operand_bytes
    return 2 * batch * m * n * k, np.ones(len(m)), batch * (operands + m * n * result_bytes)


def _of_attentions(calls: Attentions) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Return the same of attention without a window."""
    scores = calls.batch * calls.heads * calls.queries * calls.keys
    computed = np.where((calls.causal > 0) & (calls.queries > 1), CAUSAL_WORK, 1.0)
    rows = calls.heads * calls.queries + calls.key_heads * calls.keys
    moved_bytes = 2 * calls.batch * rows * calls.head_size * calls.element_bytes
    return 4 * scores * calls.head_size, computed, moved_bytes


def _own(device: DeviceSpec) -> Iterator[Measured]:
    """Yield the products in float32 and the convolutions that fxpart measured."""
    products, convolved = float32_products(), convolutions()
    counted = _of_products(products.products)
    yield Measured(device, "gemm", "float32", *counted, products.seconds, products.held_out)
    calls = convolved.calls
    columns = (*_of_products(calls.products), convolved.seconds, convolved.held_out)
    for dtype, element_bytes in (("tfloat32", 4), (_BF16, 2)):
        # A picture's three channels do not keep tensor cores busy, whatever the size.
        rows = (calls.products.operand_bytes == element_bytes) & ~calls.reads_input
        yield Measured(device, _CONVOLUTION, dtype, *(column[rows] for column in columns))


_HEADS = (
    *("device", "kind", "dtype", "rows", "share", "sustained", "stated"),
    *("long, held out", "median %", "flat: median %"),
    *("all held out", "median %", "flat: median %"),
)


def lines_of(of_device: Sequence[Measured]) -> Iterator[list[str]]:
    """Yield a line for each kind of one device."""
    reading = [m for m in of_device if m.dtype == _BF16 and m.kind in ("gemm", "memory")]
    memory, n_memory = fitted_share([long_sample(measured, computes=False) for measured in reading])
    for measured in of_device:
        if measured.kind == "memory":
            yield _line(measured, memory, n_memory, 1.0, Shares(COMPUTE_SHARE, memory))
        else:
            compute, n_rows = (
                share_of_least_error(measured, memory)
                if measured.kind == _CONVOLUTION
                else fitted_share([long_sample(measured, computes=True)])
            )
            shares = Shares(compute, memory)
            yield _line(measured, compute, n_rows, measured.sustained, shares)


def _line(
    measured: Measured, share: float, n_rows: int, sustained: float, shares: Shares
) -> list[str]:
    name = "-" if measured.kind == "memory" else measured.dtype
    flat = Shares(COMPUTE_SHARE * measured.computed, BANDWIDTH_SHARE)
    errors = [np.abs(of.errors(measured)) for of in (shares, flat)]
    held_out = measured.held_out
    return [
        *(measured.device.name, measured.kind, name, f"{n_rows:,}"),
        *(f"{share:.3f}", f"{sustained:.3f}", f"{share * sustained:.2f}"),
        *(
            cell
            for rows in (held_out & measured.is_long, held_out)
            for cell in (f"{rows.sum():,}", *(f"{100 * np.median(e[rows]):.1f}" for e in errors))
        ),
    ]


@skipped_without_files("fit_roofline")
def main(arguments: Sequence[str] | None = None) -> None:
    """Print the shares."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.truth.fit_roofline")
    add_data_argument(parser)
    parser.add_argument("--markdown", action="store_true", help="print the table in Markdown")
    options = parser.parse_args(arguments)
    lines = [line for device in measured_kernels(options.data) for line in lines_of(device)]
    print((markdown if options.markdown else table)(_HEADS, lines))


if __name__ == "__main__":
    main()
