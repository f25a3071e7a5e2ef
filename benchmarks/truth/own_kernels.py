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
from fxpart.cost.curves.convolution import (
    ConvolutionCurve,
    Convolutions,
    layout_elements,
)
from fxpart.cost.curves.gemm import GemmCurve, Products, Rates

__all__ = [
    "NAME",
    "SOURCE",
    "Float32Products",
    "MeasuredConvolutions",
    "bandwidth_shares",
    "convolutions",
    "float32_products",
    "gradient_work",
    "input_share",
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
_PICTURE_CHANNELS = 3
_LARGE_BATCH = 64
_OF_LAYER_NORM = 0.455
"""Share of the gradient of the input in a layer norm's backward, which is measured without those of
its weights: 1.968 of 4.322 ms in the step of BERT-Large with autocast (torch's profiler)."""


class Float32Products(NamedTuple):
    """Products of more than one row. All arrays have the same length."""

    products: Products
    has_bias: npt.NDArray[np.bool_]
    seconds: FloatArray
    held_out: npt.NDArray[np.bool_]
    labels: list[str]

    def predicted_s(self, curve: GemmCurve, which: npt.NDArray[np.intp]) -> FloatArray:
        """Return the times of these products by a curve."""
        rates = Rates(_DEVICE.rate_for("float32"), *_memory_and_processors())
        return curve.seconds(self.products.only(which), rates, ~self.has_bias[which])


class MeasuredConvolutions(NamedTuple):
    """Forward convolutions in float32 (TF32) and bfloat16. All arrays have the same length."""

    calls: Convolutions
    rates: FloatArray
    """Peak FLOP/s of the dtype."""
    seconds: FloatArray
    held_out: npt.NDArray[np.bool_]
    labels: list[str]

    def predicted_s(self, curve: ConvolutionCurve, which: npt.NDArray[np.intp]) -> FloatArray:
        """Return the times of these convolutions by a curve."""
        rates = Rates(self.rates[which], *_memory_and_processors())
        products, layout_bytes, reads_input = self.calls
        calls = Convolutions(products.only(which), layout_bytes[which], reads_input[which])
        return curve.forward_seconds(calls, rates, _DEVICE.rate_for("float32"))


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


def convolutions() -> MeasuredConvolutions:
    """Return the convolutions that were measured."""
    rows = _measured()["convolutions"]
    labels = [kernel_label("convolution", *row[:7]) for row in rows]
    element = np.array([4.0 if row[0] == "float32" else 2.0 for row in rows])
    batch, channels, filters, kernel, stride, side, time_us = np.array(
        [row[1:8] for row in rows], dtype=np.float64
    ).T
    m, k = batch * (side // stride) ** 2, channels * kernel**2
    reads_input = channels == _PICTURE_CHANNELS
    layouts = [
        layout_elements(*sizes, reads_input=bool(is_first))
        for *sizes, is_first in zip(
            m, filters, k, batch * channels * side**2, reads_input, strict=True
        )
    ]
    products = Products(np.ones(len(rows)), m, filters, k, element, element)
    return MeasuredConvolutions(
        Convolutions(products, np.array(layouts) * element, reads_input),
        np.array([_DEVICE.rate_for("tfloat32" if size == 4 else "bfloat16") for size in element]),
        time_us / 1e6,
        np.array([is_held_out(label) for label in labels]),
        labels,
    )


def input_share() -> float:
    """Return the median share of the float32 peak of convolutions of a picture's 3 channels."""
    calls, _, seconds, *_ = convolutions()
    flops = 2 * calls.products.m * calls.products.n * calls.products.k
    shares = flops / seconds / _DEVICE.rate_for("float32")
    return float(np.median(shares[calls.reads_input]))


def gradient_work() -> float:
    """Return the median time of a convolution's gradient relative to its forward.

    Of both dtypes in batches of 64: in smaller ones kernels are too short for it to matter.
    """
    rows = [row for row in _measured()["convolutions"] if row[1] >= _LARGE_BATCH]
    return float(np.median([row[10] / (2 * row[7]) for row in rows]))


def bandwidth_shares() -> dict[str, tuple[float, float]]:
    """Return the share of bandwidth of each kind, for float32 and bfloat16, on large operands.

    Pointwise operators are represented by additions, activations, casts and copies. Transposed
    copies and casts from bfloat16, which are slower, count as such too, since a graph does not say
    which are.
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
    operator = kind.removesuffix("_backward").removesuffix("_inference")
    is_backward = kind.endswith("_backward")
    if operator == "batch_norm" and is_backward:
        operator = "batch_norm_training"
    shares = []
    for name, row_dtype, size_bytes, forward_us, backward_us in _measured()["pointwise"]:
        if (name, row_dtype) == (operator, dtype) and size_bytes >= _LARGE_BYTES:
            moved_bytes = size_bytes * _moved(kind, 4 if dtype == "float32" else 2)
            seconds = (backward_us if is_backward else forward_us) / 1e6
            shares.append(moved_bytes / seconds / _DEVICE.memory_bandwidth_bytes_per_s)
    share = float(np.median(shares))
    if operator == "batch_norm_training":
        # One multiprocessor a channel: the share that all of them would reach.
        share *= max(1.0, _DEVICE.multiprocessors / _CHANNELS)
    return share * (_OF_LAYER_NORM if kind == "layer_norm_backward" else 1.0)


def _moved(kind: str, element: int) -> float:
    """Return the bytes that fxpart counts for an operator, relative to its operand's."""
    pooled, indices = 0.25, 0.25 * 8 / element
    others = {
        "add": 3.0,
        "cast": 1 + (6 - element) / element,
        "max_pool": 1 + pooled + indices,
        "max_pool_inference": 1 + pooled,
        "max_pool_backward": 2 + pooled + indices,
    }
    return others.get(kind, 3.0 if kind.endswith("_backward") else 2.0)


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
