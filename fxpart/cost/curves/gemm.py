"""Matrix products by shape: `GemmCurve`.

The result of a product is tiled, and tiles may also be split along k. Each piece is computed by one
multiprocessor, so pieces run in waves (tile and wave quantisation: NVIDIA, Matrix multiplication
background user's guide). The library picks the fastest tiling, and so does this model: it minimizes
over tiles and splits a smooth maximum of the times for computing, for memory traffic and for
last-level cache traffic.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from fxpart.core.graph import FloatArray, IntArray

__all__ = ["GemmCurve", "Products", "Rates", "smooth_maximum"]

_TILES = (
    (16, 64),
    (32, 64),
    (64, 32),
    (64, 64),
    (128, 64),
    (64, 128),
    (128, 128),
    (256, 128),
    (128, 256),
)
_SPLITS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
_STEP_OF_K = 64
"""Step of a tile along k."""


class Rates(NamedTuple):
    """Peaks of a device; the FLOP/s may be an array with one rate per row."""

    flops_per_s: FloatArray | float
    """Peak in the dtype of the computation."""
    bytes_per_s: float
    """Memory bandwidth."""
    multiprocessors: int


class Products(NamedTuple):
    """Batched products of (m, k) by (k, n). All arrays have the same length."""

    batch: FloatArray
    m: FloatArray
    n: FloatArray
    k: FloatArray
    operand_bytes: FloatArray
    """Bytes per element of the operands."""
    result_bytes: FloatArray
    """Bytes per element of the result."""

    def only(self, which: npt.NDArray[np.bool_] | IntArray) -> "Products":
        """Return those products alone."""
        return Products(*(column[which] for column in self))


@dataclass(frozen=True, slots=True)
class GemmCurve:
    """Performance of a GEMM library on one family of devices; shares are of its peaks."""

    launch_s: float
    """Fixed time of a kernel on the device."""
    tile_s: float
    """Time to fill and drain the pipeline of one tile."""
    compute_share: float
    """Share of peak FLOP/s reached in the limit of large tiles."""
    tile_area: float
    """Tile area that reaches half of `compute_share`."""
    memory_share: float
    tail: float
    """Share of the idle part of the last wave that is charged, from 0 to 1."""
    sharpness: float
    """Sharpness of the smooth maximum: 1 gives the sum of its terms, infinity their maximum."""
    reader_share: float
    """Read rate limit of one multiprocessor, as a multiple of its even share of the bandwidth."""
    cache_share: float
    """Bandwidth of the last-level cache, as a multiple of that of memory."""
    split_s: float
    """Cost of reducing over splits of k."""

    def seconds(
        self, products: Products, rates: Rates, may_split: npt.NDArray[np.bool_] | None = None
    ) -> FloatArray:
        """Return the time of each product; `may_split` says whose k may be split, None for all."""
        columns = np.stack(products, axis=1)
        flops_per_s = np.broadcast_to(rates.flops_per_s, len(columns))
        splits = np.ones(len(columns)) if may_split is None else may_split
        rows, row_of_product = np.unique(
            np.column_stack([columns, flops_per_s, splits]), axis=0, return_inverse=True
        )
        if not len(rows):
            return np.zeros(0)
        shapes = Products(*(rows[:, [column]] for column in range(len(products))))
        of_rows = rates._replace(flops_per_s=rows[:, [-2]])
        best = np.full(len(rows), np.inf)
        for tile in _TILES:
            tile_s = self._tile_seconds(shapes, tile, of_rows)
            best = np.minimum(best, np.where(rows[:, -1], tile_s.min(axis=1), tile_s[:, 0]))
        seconds: FloatArray = self.launch_s + best[row_of_product.reshape(-1)]
        return seconds

    def _tile_seconds(self, products: Products, tile: tuple[int, int], rates: Rates) -> FloatArray:
        """Return the time with this tile for each split, shape (rows, splits)."""
        tile_rows, tile_columns = tile
        bandwidth, processors = rates.bytes_per_s, rates.multiprocessors
        splits = np.array(_SPLITS, dtype=np.float64)[None, :]
        depth = np.ceil(products.k / splits / _STEP_OF_K) * _STEP_OF_K
        pieces = (
            products.batch
            * np.ceil(products.m / tile_rows)
            * np.ceil(products.n / tile_columns)
            * splits
        )
        waves = pieces / processors
        waves = np.where(waves <= 1, 1, waves + self.tail * (np.ceil(waves) - waves))
        share = (
            self.compute_share
            * tile_rows
            * tile_columns
            / (tile_rows * tile_columns + self.tile_area)
        )
        compute_s = 2 * tile_rows * tile_columns / (rates.flops_per_s / processors * share)
        read_s = (
            (tile_rows + tile_columns)
            * products.operand_bytes
            / (bandwidth / processors * self.reader_share)
        )
        computing_s = waves * (self.tile_s + depth * np.maximum(compute_s, read_s))
        operands = products.batch * (products.m + products.n) * products.k * products.operand_bytes
        results = products.batch * products.m * products.n
        memory_s = (operands + results * products.result_bytes) / (self.memory_share * bandwidth)
        cache_rate = self.cache_share * bandwidth
        cache_s = pieces * (tile_rows + tile_columns) * depth * products.operand_bytes / cache_rate
        roofline_s = smooth_maximum(
            self.sharpness, computing_s, *np.broadcast_arrays(memory_s, cache_s)
        )
        # Partial results are float32, written once and read once.
        reduction_s = np.where(splits > 1, self.split_s + splits * results * 8 / cache_rate, 0.0)
        # Exclude splits whose last part is empty.
        return np.where(depth * (splits - 1) >= products.k, np.inf, roofline_s + reduction_s)


def smooth_maximum(sharpness: float, *parts: FloatArray) -> FloatArray:
    """Return the p-norm of positive times, scaled to avoid under- and overflow."""
    largest = np.maximum.reduce(parts)
    total: FloatArray = largest * sum((part / largest) ** sharpness for part in parts) ** (
        1 / sharpness
    )
    return total
