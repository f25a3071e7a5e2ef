"""Matrix products by shape: `GemmCurve`.

A product is cut into tiles of its result, and these may be cut along k too; each piece is computed
by one multiprocessor, so that they come in waves (tile and wave quantisation: NVIDIA, Matrix
multiplication background user's guide). The library picks the cut that is fastest, and so does this
model: the least over tiles and splits of a smooth maximum of computing, of reading from memory and
of reading through the last-level cache.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from fxpart.core.graph import FloatArray

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
"""What a tile advances along k at a time."""


class Rates(NamedTuple):
    """Peaks of a device, each an array of one rate a row, or one for all."""

    flops_per_s: FloatArray | float
    """Of the dtype that is computed in."""
    bytes_per_s: float
    """Of its memory."""
    multiprocessors: int


class Products(NamedTuple):
    """Products of (m, k) with (k, n), `batch` of them at once. All arrays have one length."""

    batch: FloatArray
    m: FloatArray
    n: FloatArray
    k: FloatArray
    operand_bytes: FloatArray
    """Of one element of what is multiplied."""
    result_bytes: FloatArray
    """Of one element of the result."""


@dataclass(frozen=True, slots=True)
class GemmCurve:
    """What a library of matrix products makes of one family of devices; shares are of its peaks."""

    launch_s: float
    """Fixed time of a kernel on the device."""
    tile_s: float
    """Filling and emptying the pipeline of one tile."""
    compute_share: float
    """That endless tiles would reach."""
    tile_area: float
    """Of a result's tile that reaches half of that."""
    memory_share: float
    tail: float
    """How much of an unfilled last wave is waited for: 1 all of it, 0 none."""
    sharpness: float
    """Of the maximum: 1 is the sum of computing and reading, infinite the longer of them."""
    reader_share: float
    """What one multiprocessor may read, as a multiple of its even part of the memory's rate."""
    cache_share: float
    """Rate of the last-level cache, as a multiple of the memory's."""
    split_s: float
    """Adding up parts of k."""

    def seconds(self, products: Products, rates: Rates) -> FloatArray:
        """Return the time of each of the products; as long as they are."""
        columns = np.stack(products, axis=1)
        flops_per_s = np.broadcast_to(rates.flops_per_s, len(columns))
        rows, place = np.unique(
            np.column_stack([columns, flops_per_s]), axis=0, return_inverse=True
        )
        if not len(rows):
            return np.zeros(0)
        shapes = Products(*(rows[:, [column]] for column in range(len(products))))
        best = np.full(len(rows), np.inf)
        for tile in _TILES:
            cut = self._cut(shapes, tile, rates._replace(flops_per_s=rows[:, [-1]]))
            best = np.minimum(best, cut.min(axis=1))
        seconds: FloatArray = self.launch_s + best[place.reshape(-1)]
        return seconds

    def _cut(self, of: Products, tile: tuple[int, int], rates: Rates) -> FloatArray:
        """Return the time with that tile, shape (rows, splits)."""
        high, wide = tile
        bandwidth, processors = rates.bytes_per_s, rates.multiprocessors
        splits = np.array(_SPLITS, dtype=np.float64)[None, :]
        depth = np.ceil(of.k / splits / _STEP_OF_K) * _STEP_OF_K
        pieces = of.batch * np.ceil(of.m / high) * np.ceil(of.n / wide) * splits
        waves = pieces / processors
        waves = np.where(waves <= 1, 1, waves + self.tail * (np.ceil(waves) - waves))
        share = self.compute_share * high * wide / (high * wide + self.tile_area)
        compute_s = 2 * high * wide / (rates.flops_per_s / processors * share)
        read_s = (high + wide) * of.operand_bytes / (bandwidth / processors * self.reader_share)
        computing = waves * (self.tile_s + depth * np.maximum(compute_s, read_s))
        operands = of.batch * (of.m + of.n) * of.k * of.operand_bytes
        results = of.batch * of.m * of.n
        memory = (operands + results * of.result_bytes) / (self.memory_share * bandwidth)
        cache_rate = self.cache_share * bandwidth
        cache = pieces * (high + wide) * depth * of.operand_bytes / cache_rate
        smooth = smooth_maximum(self.sharpness, computing, *np.broadcast_arrays(memory, cache))
        # Parts are kept in float32, and written and read.
        adding = np.where(splits > 1, self.split_s + splits * results * 8 / cache_rate, 0.0)
        # A split whose last part has nothing to do is none.
        return np.where(depth * (splits - 1) >= of.k, np.inf, smooth + adding)


def smooth_maximum(sharpness: float, *parts: FloatArray) -> FloatArray:
    """Return the p-norm of positive times, scaled so that none of their powers is lost."""
    most = np.maximum.reduce(parts)
    total: FloatArray = most * sum((part / most) ** sharpness for part in parts) ** (1 / sharpness)
    return total
