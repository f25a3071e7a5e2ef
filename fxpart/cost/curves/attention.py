"""Fused attention by shape: `AttentionCurve` of whole prompts, `DecodeCurve` of single tokens.

Blocks of queries go over blocks of keys, each block of queries on one multiprocessor (Dao:
FlashAttention-2, 2023, arXiv:2307.08691). What a token reads of a cache is split over
multiprocessors where heads are too few to fill them (Dao et al.: Flash-Decoding, 2023).
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from fxpart.core.graph import FloatArray
from fxpart.cost.curves.gemm import Rates, smooth_maximum

__all__ = ["ROWS_OF_BLOCK", "AttentionCurve", "Attentions", "DecodeCurve"]

_BLOCK = 128.0
"""Queries, and keys, of a block."""
ROWS_OF_BLOCK = 64.0
"""Queries that a block is filled up to."""
_LEAST_ROWS = 0.3
"""The least part of a block that its work is counted for."""


class Attentions(NamedTuple):
    """Calls of fused attention; all arrays have one length."""

    batch: FloatArray
    queries: FloatArray
    keys: FloatArray
    heads: FloatArray
    key_heads: FloatArray
    """Of keys and values; as many as `heads`, or fewer that groups of heads share."""
    head_size: FloatArray
    window: FloatArray
    """Keys that a query sees at most; 0 for all."""
    causal: FloatArray
    """1 where a query sees no key after its own, else 0."""
    element_bytes: FloatArray
    """Of queries and results."""
    cache_bytes: FloatArray
    """Of an element of the cache that keys and values are also written to; 0 where none is."""


@dataclass(frozen=True, slots=True)
class AttentionCurve:
    """What a library of attention makes of whole prompts; shares are of a device's peaks."""

    launch_s: float
    """Fixed time of all kernels, the one that writes a cache included."""
    cache_launch_s: float
    """The part of it that writing a cache takes."""
    block_s: float
    """Fixed time of a block of queries."""
    compute_share: float
    """That endless heads would reach."""
    half_size: float
    """Head size that reaches half of that."""
    large_size: float
    """Head size at which registers run short, and half is lost again."""
    memory_share: float
    cache_share: float
    """Of the memory's rate that writing a cache reaches."""
    sharpness: float
    """Of the maximum of all work and the longest block."""
    longest: float
    """Time of the longest block, as a multiple of its work."""
    packs_groups: float
    """1 where heads that share keys fill one block; 0 where they do so for single queries only."""

    def seconds(self, calls: Attentions, rates: Rates) -> FloatArray:
        """Return the time of each call."""
        queries, keys = calls.queries, calls.keys
        sharing = np.where(
            (queries == 1) | bool(self.packs_groups), calls.heads / calls.key_heads, 1
        )
        span = np.minimum(_BLOCK / sharing, queries)
        blocks = calls.batch * calls.heads / sharing * np.ceil(queries * sharing / _BLOCK)
        seen = np.where(calls.window > 0, np.minimum(calls.window, keys), keys)
        # Rows at a prompt's begin see fewer keys than a window holds.
        mean = np.where(calls.causal > 0, seen * (1 - seen / (2 * keys)) + span / 2, seen)
        most = np.where(calls.causal > 0, np.minimum(keys, seen + span), seen)
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
        total = blocks * (self.block_s + np.maximum(mean / _BLOCK + 0.5, 1) * work_s)
        total /= rates.multiprocessors
        longest = self.longest * (self.block_s + np.ceil(most / _BLOCK) * work_s)
        stored = calls.batch * calls.key_heads * keys * size
        passed = 2 * calls.batch * calls.heads * queries * size
        memory = (
            (passed + 2 * stored) * calls.element_bytes / (self.memory_share * rates.bytes_per_s)
        )
        writes = calls.cache_bytes > 0
        cache = stored * (calls.element_bytes + calls.cache_bytes)
        cache_s = np.where(
            writes, cache / (self.cache_share * rates.bytes_per_s), -self.cache_launch_s
        )
        return self.launch_s + smooth_maximum(self.sharpness, total, longest, memory) + cache_s


@dataclass(frozen=True, slots=True)
class DecodeCurve:
    """What a library of attention makes of single tokens that read a cache."""

    launch_s: float
    cache_launch_s: float
    """The part of it that writing the new token to the cache takes."""
    memory_share: float
    reader_share: float
    """What one multiprocessor may read, as a multiple of its even part of the memory's rate."""
    sharpness: float
    split_s: float
    """Adding up parts, where the keys of a head are split."""
    compute_share: float
    head_s: float
    """For each head of keys of each sequence: entries of the cache, and of its table."""
    group_s: float
    """Where several heads share keys."""
    copy_s: float
    """Where they do so in several groups of several sequences, which makes a copy; 0 where heads
    are packed without one."""
    packs_groups: float
    """As of `AttentionCurve`; where 0, keys of heads that are not shared are not split either."""

    def seconds(self, calls: Attentions, rates: Rates) -> FloatArray:
        """Return the time of each call; its queries are one a sequence."""
        seen = np.where(calls.window > 0, np.minimum(calls.window, calls.keys), calls.keys)
        sharing = calls.heads / calls.key_heads
        kept_bytes = np.where(calls.cache_bytes > 0, calls.cache_bytes, calls.element_bytes)
        per_key = 2 * calls.head_size * kept_bytes
        groups = calls.batch * calls.key_heads
        blocks = groups * np.ceil(sharing / ROWS_OF_BLOCK)
        # A window need not begin where a block does.
        cut = (calls.window > 0) & (calls.keys >= calls.window)
        key_blocks = np.ceil(seen / _BLOCK) + cut
        splits = np.clip(np.floor(rates.multiprocessors / blocks), 1, key_blocks)
        splits = np.where((sharing > 1) | bool(self.packs_groups), splits, 1)
        waves = np.maximum(1, blocks * splits / rates.multiprocessors)
        one_s = rates.bytes_per_s / rates.multiprocessors * self.reader_share
        reading = waves * np.ceil(key_blocks / splits) * _BLOCK * per_key / one_s
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
        busy = smooth_maximum(self.sharpness, reading, memory, computing)
        return fixed + busy + passed / (self.memory_share * rates.bytes_per_s)
