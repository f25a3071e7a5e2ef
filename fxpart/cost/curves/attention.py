"""Fused attention by shape: `AttentionCurve` for whole prompts, `DecodeCurve` for single tokens.

Each block of queries iterates over blocks of keys on one multiprocessor (Dao: FlashAttention-2,
2023, arXiv:2307.08691). In decoding, the cache is split over multiprocessors if there are too few
heads to occupy them (Dao et al.: Flash-Decoding, 2023).
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from fxpart.core.graph import FloatArray, IntArray
from fxpart.cost.curves.gemm import Rates, smooth_maximum

__all__ = ["ROWS_OF_BLOCK", "AttentionCurve", "Attentions", "DecodeCurve"]

_BLOCK = 128.0
"""Number of queries, and of keys, per block."""
ROWS_OF_BLOCK = 64.0
"""A block is padded to a multiple of this many queries."""
_LEAST_ROWS = 0.3
"""Smallest share of a block's work that is charged."""


class Attentions(NamedTuple):
    """Calls of fused attention; all arrays have the same length."""

    batch: FloatArray
    queries: FloatArray
    keys: FloatArray
    heads: FloatArray
    key_heads: FloatArray
    """Heads of keys and values: as many as `heads`, or fewer in grouped-query attention."""
    head_size: FloatArray
    window: FloatArray
    """Sliding window in keys; 0 for none."""
    causal: FloatArray
    """1 for causal attention, else 0."""
    element_bytes: FloatArray
    """Bytes per element of queries and results."""
    cache_bytes: FloatArray
    """Bytes per element of the cache to which keys and values are also written; 0 for none."""

    def only(self, which: npt.NDArray[np.bool_] | IntArray) -> "Attentions":
        """Return those calls alone."""
        return Attentions(*(column[which] for column in self))


@dataclass(frozen=True, slots=True)
class AttentionCurve:
    """Performance of an attention library on whole prompts; shares are of a device's peaks."""

    launch_s: float
    """Fixed time of all kernels, including the cache write."""
    cache_launch_s: float
    """The part of `launch_s` for writing the cache."""
    block_s: float
    """Fixed time of a block of queries."""
    compute_share: float
    """Share of peak FLOP/s reached in the limit of large heads."""
    half_size: float
    """Head size that reaches half of `compute_share`."""
    large_size: float
    """Head size at which register pressure halves the rate again."""
    memory_share: float
    cache_share: float
    """Share of memory bandwidth reached by the cache write."""
    sharpness: float
    """Sharpness of the smooth maximum of total work and the longest block."""
    longest: float
    """Time of the longest block, as a multiple of its work."""
    packs_groups: float
    """1 if heads that share keys are packed into one block; 0 if only for single queries."""

    def seconds(self, calls: Attentions, rates: Rates) -> FloatArray:
        """Return the time of each call."""
        queries, keys = calls.queries, calls.keys
        sharing = np.where(
            (queries == 1) | bool(self.packs_groups), calls.heads / calls.key_heads, 1
        )
        span = np.minimum(_BLOCK / sharing, queries)
        blocks = calls.batch * calls.heads / sharing * np.ceil(queries * sharing / _BLOCK)
        seen = np.where(calls.window > 0, np.minimum(calls.window, keys), keys)
        # The first rows of a prompt see fewer keys than the window.
        mean_seen = np.where(calls.causal > 0, seen * (1 - seen / (2 * keys)) + span / 2, seen)
        most_seen = np.where(calls.causal > 0, np.minimum(keys, seen + span), seen)
        size = calls.head_size
        share = (
            self.compute_share
            * size
            / (size + self.half_size)
            / (1 + (size / self.large_size) ** 2)
        )
        rate = rates.flops_per_s / rates.multiprocessors * share
        rows = np.minimum(np.ceil(queries * sharing / ROWS_OF_BLOCK) * ROWS_OF_BLOCK, _BLOCK)
        work_s = 4 * np.maximum(rows, _LEAST_ROWS * _BLOCK) * _BLOCK * size / rate
        total = blocks * (self.block_s + np.maximum(mean_seen / _BLOCK + 0.5, 1) * work_s)
        total /= rates.multiprocessors
        longest = self.longest * (self.block_s + np.ceil(most_seen / _BLOCK) * work_s)
        key_elements = calls.batch * calls.key_heads * keys * size
        io_elements = 2 * calls.batch * calls.heads * queries * size
        memory = (
            (io_elements + 2 * key_elements)
            * calls.element_bytes
            / (self.memory_share * rates.bytes_per_s)
        )
        writes = calls.cache_bytes > 0
        cache = key_elements * (calls.element_bytes + calls.cache_bytes)
        cache_s = np.where(
            writes, cache / (self.cache_share * rates.bytes_per_s), -self.cache_launch_s
        )
        return self.launch_s + smooth_maximum(self.sharpness, total, longest, memory) + cache_s


@dataclass(frozen=True, slots=True)
class DecodeCurve:
    """Performance of an attention library on single tokens that read a cache."""

    launch_s: float
    cache_launch_s: float
    """The part of `launch_s` for writing the new token to the cache."""
    memory_share: float
    reader_share: float
    """Read rate limit of one multiprocessor, as a multiple of its even share of the bandwidth."""
    sharpness: float
    split_s: float
    """Cost of combining partial results if the keys of a head are split."""
    compute_share: float
    head_s: float
    """Cost per key head and sequence: entries of the cache and of its block table."""
    group_s: float
    """Additional cost if heads share keys."""
    copy_s: float
    """Cost of the copy that sharing makes with several groups and sequences; 0 if heads are packed
    without one."""
    packs_groups: float
    """As in `AttentionCurve`; if 0, unshared keys are not split either."""

    def seconds(self, calls: Attentions, rates: Rates) -> FloatArray:
        """Return the time of each call, with one query per sequence."""
        seen = np.where(calls.window > 0, np.minimum(calls.window, calls.keys), calls.keys)
        sharing = calls.heads / calls.key_heads
        kept_bytes = np.where(calls.cache_bytes > 0, calls.cache_bytes, calls.element_bytes)
        per_key = 2 * calls.head_size * kept_bytes
        groups = calls.batch * calls.key_heads
        blocks = groups * np.ceil(sharing / ROWS_OF_BLOCK)
        # A window need not begin at a block boundary.
        is_cut = (calls.window > 0) & (calls.keys >= calls.window)
        key_blocks = np.ceil(seen / _BLOCK) + is_cut
        splits = np.clip(np.floor(rates.multiprocessors / blocks), 1, key_blocks)
        splits = np.where((sharing > 1) | bool(self.packs_groups), splits, 1)
        waves = np.maximum(1, blocks * splits / rates.multiprocessors)
        reader_bytes_per_s = rates.bytes_per_s / rates.multiprocessors * self.reader_share
        reading = waves * np.ceil(key_blocks / splits) * _BLOCK * per_key / reader_bytes_per_s
        memory = groups * seen * per_key / (self.memory_share * rates.bytes_per_s)
        work = 4 * blocks * ROWS_OF_BLOCK * seen * calls.head_size
        computing = work / (self.compute_share * np.asarray(rates.flops_per_s))
        passed = 2 * calls.batch * calls.heads * calls.head_size * calls.element_bytes
        fixed = (
            self.launch_s
            + self.head_s * groups
            + np.where(splits > 1, self.split_s, 0.0)
            + np.where(sharing > 1, self.group_s, 0.0)
            + np.where((sharing > 1) & (calls.key_heads > 1) & (calls.batch > 1), self.copy_s, 0.0)
            - np.where(calls.cache_bytes > 0, 0.0, self.cache_launch_s)
        )
        roofline_s = smooth_maximum(self.sharpness, reading, memory, computing)
        return fixed + roofline_s + passed / (self.memory_share * rates.bytes_per_s)
