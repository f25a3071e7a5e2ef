"""Kernels that fxpart measured on an H100: products in float32, and convolutions.

Measured by ``python -m benchmarks.gpu.measure --constants products convolutions pointwise``; the
figures are in ``benchmarks/gpu/h100_kernels.json``, whose rows `benchmarks.gpu.kernels` describes.
Shares of memory bandwidth are read off there too (`bandwidth_shares`).
"""

import json
import statistics
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

import benchmarks.gpu
from benchmarks.truth.kernel_tables import DEVICES, FAMILIES, is_held_out, kernel_label
from benchmarks.truth.row import Row
from fxpart.core.graph import FloatArray
from fxpart.cost.curves.bandwidth import KINDS
from fxpart.cost.curves.convolution import ConvolutionCurve
from fxpart.cost.curves.gemm import GemmCurve, Products, Rates

__all__ = [
    "NAME",
    "SOURCE",
    "Convolutions",
    "Float32Products",
    "bandwidth_shares",
    "convolutions",
    "float32_products",
    "gradient_work",
    "rows",
]

NAME = "own_kernels"
SOURCE = "fxpart's own: python -m benchmarks.gpu.measure on an H100 SXM, torch 2.11, CUDA 13.0"
_FILE = Path(benchmarks.gpu.__file__).with_name("h100_kernels.json")
_DEVICE = DEVICES["h100_sxm"]
_LARGE_BYTES = 2**26
"""Operands above this size do not fit in the last-level cache."""
_CHANNELS = 64
"""Of the images that are normalized there."""


class Float32Products(NamedTuple):
    """Products of more than one row. All arrays have the same length."""

    products: Products
    has_bias: npt.NDArray[np.bool_]
    seconds: FloatArray
    held_out: npt.NDArray[np.bool_]
    labels: list[str]

    def predicted_s(self, curve: GemmCurve, which: npt.NDArray[np.intp]) -> FloatArray:
        """Return the times of these products by a curve."""
        result = np.zeros(len(which))
        rates = Rates(_DEVICE.rate_for("float32"), *_memory_and_processors())
        for has_bias in (False, True):
            rows = self.has_bias[which] == has_bias
            products = Products(*(column[which[rows]] for column in self.products))
            result[rows] = curve.seconds(products, rates, splits=not has_bias)
        return result


class Convolutions(NamedTuple):
    """Forward convolutions in float32 (TF32) and bfloat16. All arrays have the same length."""

    products: Products
    layout_bytes: npt.NDArray[np.int64]
    rates: FloatArray
    """Peak FLOP/s of the dtype."""
    seconds: FloatArray
    held_out: npt.NDArray[np.bool_]
    labels: list[str]

    def predicted_s(self, curve: ConvolutionCurve, which: npt.NDArray[np.intp]) -> FloatArray:
        """Return the times of these convolutions by a curve."""
        rates = Rates(self.rates[which], *_memory_and_processors())
        products = Products(*(column[which] for column in self.products))
        return curve.convolution_seconds(products, self.layout_bytes[which], rates)


def _memory_and_processors() -> tuple[float, int]:
    return _DEVICE.memory_bandwidth_bytes_per_s, _DEVICE.multiprocessors


@cache
def _measured() -> dict[str, list[list[Any]]]:
    tables: dict[str, list[list[Any]]] = json.loads(_FILE.read_text(encoding="utf-8"))
    return tables


def float32_products() -> Float32Products:
    """Return the products that were measured, without those of single rows."""
    rows = [row for row in _measured()["products"] if row[2] > 1]
    labels = [kernel_label("float32", *row[:5]) for row in rows]
    batch, m, n, k, time_us = np.array([row[1:] for row in rows], dtype=np.float64).T
    four = np.full(len(rows), 4.0)
    return Float32Products(
        Products(batch, m, n, k, four, four),
        np.array([row[0] == "linear" for row in rows]),
        time_us / 1e6,
        np.array([is_held_out(label) for label in labels]),
        labels,
    )


def convolutions() -> Convolutions:
    """Return the convolutions that were measured, without patches, which look like products."""
    rows = [row for row in _measured()["convolutions"] if row[4] == 1 or row[4] > row[5]]
    labels = [kernel_label("convolution", *row[:7]) for row in rows]
    element = np.array([4.0 if row[0] == "float32" else 2.0 for row in rows])
    batch, channels, filters, kernel, stride, side, time_us = np.array(
        [row[1:8] for row in rows], dtype=np.float64
    ).T
    m, k = batch * (side // stride) ** 2, channels * kernel**2
    inputs = batch * channels * side**2
    is_changed = m * k != inputs
    return Convolutions(
        Products(np.ones(len(rows)), m, filters, k, element, element),
        np.where(is_changed, 2 * (inputs + m * filters) * element, 0).astype(np.int64),
        np.array([_DEVICE.rate_for("tfloat32" if size == 4 else "bfloat16") for size in element]),
        time_us / 1e6,
        np.array([is_held_out(label) for label in labels]),
        labels,
    )


def gradient_work() -> float:
    """Return the median time of a convolution's gradient relative to its forward."""
    rows = [row for row in _measured()["convolutions"] if len(row) > 8 and row[1] >= 64]
    return float(np.median([row[10] / (2 * row[7]) for row in rows]))


def bandwidth_shares() -> dict[str, tuple[float, float]]:
    """Return the share of bandwidth of each kind, for float32 and bfloat16, on large operands.

    Bytes are those that fxpart counts: each operand and result once. Pointwise operators are
    represented by additions and activations.
    """
    shares = {
        kind: (_share(kind, "float32"), _share(kind, "bfloat16"))
        for kind in KINDS
        if kind != "pointwise"
    }
    pointwise = [
        [_share(operator, dtype) for operator in ("add", "relu", "gelu", "cast", "copy")]
        for dtype in ("float32", "bfloat16")
    ]
    of_32_bits, of_16_bits = map(statistics.median, pointwise)
    return {"pointwise": (of_32_bits, of_16_bits), **shares}


def _share(kind: str, dtype: str) -> float:
    """Return the median share of an operator, or of the backward of one."""
    operator = kind.removesuffix("_backward")
    is_backward = kind != operator
    if operator == "batch_norm" and is_backward:
        operator = "batch_norm_training"  # in train mode
    shares = []
    for name, row_dtype, size_bytes, forward_us, backward_us in _measured()["pointwise"]:
        if (name, row_dtype) == (operator, dtype) and size_bytes >= _LARGE_BYTES:
            moved_bytes = size_bytes * _moved(name, dtype, is_backward=is_backward)
            seconds = (backward_us if is_backward else forward_us) / 1e6
            shares.append(moved_bytes / seconds / _DEVICE.memory_bandwidth_bytes_per_s)
    share = float(np.median(shares))
    if operator == "batch_norm_training":
        # One multiprocessor a channel: the share that all of them would reach.
        share *= max(1.0, _DEVICE.multiprocessors / _CHANNELS)
    return share


def _moved(operator: str, dtype: str, *, is_backward: bool) -> float:
    """Return the bytes that an operator reads and writes, relative to its operand's."""
    element = 4 if dtype == "float32" else 2
    if operator == "add":
        return 3
    if operator == "cast":
        return 1 + (6 - element) / element
    if operator == "max_pool":
        pooled = 0.25 * (1 + 8 / element)  # results, and indices in 64 bits
        return 1 + pooled
    return 3 if is_backward else 2


def rows(_: Path) -> Iterator[Row]:
    """Yield a row for each product and convolution, in microseconds."""
    family = FAMILIES["h100"]
    for measured, curve in (
        (float32_products(), family.gemm_float32),
        (convolutions(), family.convolution),
    ):
        every = np.arange(len(measured.labels))
        predicted = measured.predicted_s(curve, every)  # type: ignore[arg-type]
        columns = (measured.labels, predicted, measured.seconds, measured.held_out)
        for label, guess, seconds, held_out in zip(*columns, strict=True):
            yield Row(label, 1e6 * guess, 1e6 * seconds, "us", held_out=bool(held_out))
