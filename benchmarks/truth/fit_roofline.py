"""Fit the shares of the peaks that a roofline uses (`efficiency` in conf/accelerator) to kernels.

    python -m benchmarks.truth.fit_roofline --data FOLDER [--markdown]

prints the shares by device, kind of operator, and dtype or memory bandwidth. Long kernels decide a
share: those whose ideal time, at the peak that bounds them, is at least `_LONG` times the overhead
of an operator. The share is the median of ideal over measured time without that overhead, weighted
by the square root of the measured time, as in `fxpart.cost.fit`. Kernels were measured one by one:
what products and attention in 16 bits reach is then multiplied by the part of it that long runs
sustain under the power limit (`sustained_share` in conf/latency/kernels.yaml). Few convolutions are
long: theirs is the share of least error of the whole roofline on all of them, with the same
weights. Operators without FLOPs: the share at which those of GPT-2's training step together take
the time that they take at the shares of their kinds (`bandwidth_shares` in the same file).

Half of the rows are held out. Errors are those of the whole roofline on them, before that
multiplication, for the rows bound by what the share is of; *flat* is 0.7 of FLOP/s, of all scores
of attention whatever its mask, and 0.8 of memory bandwidth. Devices whose tables are not installed
are left out.
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
from benchmarks.truth.planned_run import planned_run
from fxpart.core.efficiency import MEMORY, OTHER
from fxpart.core.graph import FloatArray
from fxpart.core.topology import DeviceSpec
from fxpart.cost.curves.attention import Attentions
from fxpart.cost.curves.bandwidth import bandwidth_shares
from fxpart.cost.curves.gemm import Products
from fxpart.cost.roofline import BANDWIDTH_SHARE, CAUSAL_WORK, COMPUTE_SHARE

__all__ = [
    "Measured",
    "Shares",
    "fitted_share",
    "lines_of",
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
_STEP = ("model=gpt2", "phase=training", "model.batch_size=8", "devices=1xh100", "mode=single")


class Measured(NamedTuple):
    """Measured kernels of one kind, dtype and device. Arrays have the same length."""

    device: DeviceSpec
    kind: str
    """A field of `fxpart.core.efficiency.Efficiency`."""
    dtype: str
    fits: tuple[bool, ...]
    """The shares to fit: True for that of FLOP/s, False for that of memory bandwidth."""
    flops: FloatArray
    """As a graph counts them: all scores of attention, whatever its mask."""
    computed: FloatArray
    """The share of these FLOPs that the kernel computes."""
    moved_bytes: FloatArray
    seconds: FloatArray
    held_out: npt.NDArray[np.bool_]

    def only(self, rows: npt.NDArray[np.bool_]) -> "Measured":
        """Return those rows alone."""
        return self._replace(
            flops=self.flops[rows],
            computed=self.computed[rows],
            moved_bytes=self.moved_bytes[rows],
            seconds=self.seconds[rows],
            held_out=self.held_out[rows],
        )

    @property
    def ideal_s(self) -> tuple[FloatArray, FloatArray]:
        """The times at peak FLOP/s and at peak memory bandwidth."""
        computed = self.flops * self.computed
        bandwidth = self.device.memory_bandwidth_bytes_per_s
        return computed / self.device.rate_for(self.dtype), self.moved_bytes / bandwidth

    @property
    def computes(self) -> npt.NDArray[np.bool_]:
        """Which kernels are bound by computing, and not by memory."""
        computing_s, moving_s = self.ideal_s
        return computing_s >= moving_s

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


def fitted_share(measured: Measured, *, computes: bool) -> tuple[float, int]:
    """Return the share that long kernels bound by computing, or else by memory, reach.

    The second number is that of the kernels, without those held out.
    """
    chosen = ~measured.held_out & measured.is_long & (measured.computes == computes)
    seconds = measured.seconds[chosen]
    shares = np.maximum(*measured.ideal_s)[chosen] / (seconds - _OVERHEAD_S)
    order = np.argsort(shares, kind="stable")
    total = np.cumsum(np.sqrt(seconds)[order])
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
            _from_table(device, kind, read_kernels(data, prefix, kind, _BF16)) for kind in _TABLES
        ]
        yield [*of_device, *(_own(device) if prefix == _OWN else [])]
    with skipped_without_files(", ".join(INSTALLED_DEVICES)):
        for name, device in INSTALLED_DEVICES.items():
            yield [_from_table(device, kind, read_installed(name, kind)) for kind in _TABLES]


_TABLES = {
    "gemm": ("gemm", (True, False)),
    "context_attention": ("attention", (True,)),
    "generation_attention": ("attention", (False,)),
}
"""The kind of operator in a table, and the shares that are fitted to it."""


def _from_table(device: DeviceSpec, table_kind: str, kernels: Kernels) -> Measured:
    (kind, fits), calls = _TABLES[table_kind], kernels.calls
    measured = (kernels.seconds, kernels.held_out)
    if isinstance(calls, Products):
        return Measured(device, kind, _BF16, fits, *_of_products(calls), *measured)
    # A graph does not say that attention has a window.
    every = Measured(device, kind, _BF16, fits, *_of_attentions(calls), *measured)
    return every.only(calls.window == 0)


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
    yield Measured(
        device, "gemm", "float32", (True,), *counted, products.seconds, products.held_out
    )
    calls = convolved.calls
    for dtype, element_bytes in (("tfloat32", 4), (_BF16, 2)):
        counted = _of_products(calls.products)
        measured = (convolved.seconds, convolved.held_out)
        # A picture's three channels do not keep tensor cores busy, whatever the size.
        rows = (calls.products.operand_bytes == element_bytes) & ~calls.reads_input
        yield Measured(device, _CONVOLUTION, dtype, (True,), *counted, *measured).only(rows)


_HEADS = (
    *("device", "kind", "of", "rows", "share", "sustained", "stated"),
    *("long, held out", "median %", "flat: median %"),
    *("all held out", "median %", "flat: median %"),
)


def lines_of(of_device: Sequence[Measured]) -> Iterator[list[str]]:
    """Yield a line for each share of one device."""
    memory = {
        measured.kind: fitted_share(measured, computes=False)
        for measured in of_device
        if False in measured.fits
    }
    for measured in of_device:
        of_memory, n_memory = memory.get(measured.kind, (BANDWIDTH_SHARE, 0))
        compute, n_rows = COMPUTE_SHARE, 0
        if measured.kind == _CONVOLUTION:
            compute, n_rows = share_of_least_error(measured, of_memory)
        elif True in measured.fits:
            compute, n_rows = fitted_share(measured, computes=True)
        shares = Shares(compute, of_memory)
        for computes in measured.fits:
            yield [
                *(measured.device.name, measured.kind, measured.dtype if computes else MEMORY),
                f"{n_rows if computes else n_memory:,}",
                *_stated(*((compute, measured.sustained) if computes else (of_memory, 1.0))),
                *_errors(measured, shares, computes=computes),
            ]


def _stated(share: float, sustained: float) -> tuple[str, ...]:
    return f"{share:.3f}", f"{sustained:.3f}", f"{share * sustained:.2f}"


def _errors(measured: Measured, shares: Shares, *, computes: bool) -> Iterator[str]:
    """Yield the held-out rows with their median error, by `shares` and flat: long ones, and all."""
    flat = Shares(COMPUTE_SHARE * measured.computed, BANDWIDTH_SHARE)
    errors = [np.abs(of.errors(measured)) for of in (shares, flat)]
    held_out = measured.held_out & (measured.computes == computes)
    if measured.kind == _CONVOLUTION:
        held_out = measured.held_out  # it is fitted to all
    for rows in (held_out & measured.is_long, held_out):
        yield f"{rows.sum():,}"
        yield from (
            f"{100 * np.median(error[rows]):.1f}" if rows.any() else "-" for error in errors
        )


def _line_of_others() -> list[str]:
    """Return the line of operators without FLOPs on the device that fxpart measured."""
    device, shares = DEVICES[_OWN], FAMILIES[DEVICES[_OWN].curves].bandwidth_shares
    assert shares is not None
    graph = planned_run(_STEP).problem.graph
    reached = bandwidth_shares(graph, shares, device.multiprocessors, fused=False)
    moves = (graph.flops == 0) & (graph.moved_bytes > 0)
    moved_bytes = graph.moved_bytes[moves]
    share = float(moved_bytes.sum() / (moved_bytes / reached[moves]).sum())
    line = [device.name, OTHER, MEMORY, f"{moves.sum():,}", *_stated(share, 1.0)]
    return [*line, *["-"] * (len(_HEADS) - len(line))]


@skipped_without_files("fit_roofline")
def main(arguments: Sequence[str] | None = None) -> None:
    """Print the shares."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.truth.fit_roofline")
    add_data_argument(parser)
    parser.add_argument("--markdown", action="store_true", help="print the table in Markdown")
    options = parser.parse_args(arguments)
    lines = [line for device in measured_kernels(options.data) for line in lines_of(device)]
    lines.append(_line_of_others())
    print((markdown if options.markdown else table)(_HEADS, lines))


if __name__ == "__main__":
    main()
