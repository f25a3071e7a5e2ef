"""`run_allocator`: a model of torch's CUDA allocator.

Torch allocates segments from the driver, splits them into blocks and caches freed blocks, so it
reserves more than its tensors take. Sizes and rules are those of ``c10/cuda/CUDACachingAllocator``
with default settings, for one stream.
"""

import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from fxpart.core.graph import IntArray
from fxpart.support.compiled import compiled, inlined

__all__ = ["AllocatorRun", "allocator_loop", "run_allocator"]

_BLOCK_BYTES = 512
"""Every allocation is rounded up to a multiple of this (``kMinBlockSize``)."""
_SEGMENT_BYTES = 2 * 2**20
"""Segments are multiples of this (``kSmallBuffer``, ``kRoundLarge``)."""
_SMALL_BYTES = 2**20
"""Blocks up to this size share segments of 2 MiB (``kSmallSize``)."""
_SHARED_BYTES = 20 * 2**20
"""Larger blocks below the next size share segments of this size (``kLargeBuffer``)."""
_LARGE_BYTES = 10 * 2**20
"""From this size on, a block has its own segment (``kMinLargeAlloc``)."""
_NONE = -1


class AllocatorRun(NamedTuple):
    """What an allocator did, by event."""

    address: IntArray
    """The address of the block that was allocated or freed. Addresses increase with each
    segment."""
    allocated_bytes: IntArray
    """Bytes in blocks in use afterwards."""
    reserved_bytes: IntArray
    """Bytes in segments afterwards; above the limit if torch would run out of memory."""


def run_allocator(
    size_bytes: IntArray, events: IntArray, limit_bytes: float = math.inf
) -> AllocatorRun:
    """Return what an allocator without segments does at each of `events`.

    An allocation takes the smallest sufficient free block, or else one of a new segment. If that
    exceeds `limit_bytes`, all unused segments are released first (``release_cached_blocks``).
    O(free blocks) for each event.

    Args:
        size_bytes: size of each tensor, shape (n,).
        events: an index t of a tensor to allocate it, ~t to free it; shape (m,).
        limit_bytes: the memory available for segments.

    """
    # A segment and a remainder at most for each allocation.
    n_blocks = 2 * int(np.count_nonzero(events >= 0)) + 1
    blocks = _Blocks(
        address=np.zeros(n_blocks, dtype=np.int64),
        size_bytes=np.zeros(n_blocks, dtype=np.int64),
        before=np.full(n_blocks, _NONE, dtype=np.int64),
        after=np.full(n_blocks, _NONE, dtype=np.int64),
        is_small=np.zeros(n_blocks, dtype=np.bool_),
        is_free=np.zeros(n_blocks, dtype=np.bool_),
        free=np.zeros((2, n_blocks), dtype=np.int64),
        counts=np.zeros(5, dtype=np.int64),
        of_tensor=np.full(len(size_bytes), _NONE, dtype=np.int64),
    )
    run = AllocatorRun(*(np.zeros(len(events), dtype=np.int64) for _ in range(3)))
    allocator_loop(blocks, size_bytes, events, float(limit_bytes), run)
    return run


_N_BLOCKS, _RESERVED, _NEXT_ADDRESS = 2, 3, 4
"""Indices into `_Blocks.counts`."""


class _Blocks(NamedTuple):
    """The blocks of all segments; neighbours are blocks, `_NONE` at the ends of a segment."""

    address: IntArray
    size_bytes: IntArray
    before: IntArray
    after: IntArray
    is_small: npt.NDArray[np.bool_]
    """Whether the segment is shared by small blocks."""
    is_free: npt.NDArray[np.bool_]
    free: IntArray
    """Free blocks, large ones and small ones, sorted by size, then by address; shape (2, n)."""
    counts: IntArray
    """Numbers of free large, free small and all blocks, bytes in segments, and the address of the
    next segment."""
    of_tensor: IntArray
    """The block of each tensor."""


@inlined
def _place(blocks: _Blocks, kind: int, size_bytes: int, address: int) -> int:
    """Return the place of a block among the free ones."""
    low, high = 0, blocks.counts[kind]
    while low < high:
        middle = (low + high) // 2
        block = blocks.free[kind, middle]
        size = blocks.size_bytes[block]
        if size < size_bytes or (size == size_bytes and blocks.address[block] < address):
            low = middle + 1
        else:
            high = middle
    return low


@compiled
def _insert(blocks: _Blocks, block: int) -> None:
    """Add a block to the free ones."""
    kind = int(blocks.is_small[block])
    place = _place(blocks, kind, blocks.size_bytes[block], blocks.address[block])
    for i in range(blocks.counts[kind], place, -1):
        blocks.free[kind, i] = blocks.free[kind, i - 1]
    blocks.free[kind, place] = block
    blocks.counts[kind] += 1
    blocks.is_free[block] = True


@compiled
def _remove(blocks: _Blocks, block: int) -> None:
    """Remove a block from the free ones."""
    kind = int(blocks.is_small[block])
    place = _place(blocks, kind, blocks.size_bytes[block], blocks.address[block])
    blocks.counts[kind] -= 1
    for i in range(place, blocks.counts[kind]):
        blocks.free[kind, i] = blocks.free[kind, i + 1]
    blocks.is_free[block] = False


@compiled
def _new_block(blocks: _Blocks, address: int, size_bytes: int, is_small: bool) -> int:
    block = int(blocks.counts[_N_BLOCKS])
    blocks.counts[_N_BLOCKS] += 1
    blocks.address[block], blocks.size_bytes[block] = address, size_bytes
    blocks.is_small[block] = is_small
    return block


@inlined
def _split(blocks: _Blocks, block: int, size_bytes: int) -> None:
    """Shrink a block to `size_bytes`; the remainder becomes free."""
    rest = _new_block(
        blocks,
        blocks.address[block] + size_bytes,
        blocks.size_bytes[block] - size_bytes,
        blocks.is_small[block],
    )
    after = blocks.after[block]
    blocks.before[rest], blocks.after[rest] = block, after
    if after != _NONE:
        blocks.before[after] = rest
    blocks.size_bytes[block], blocks.after[block] = size_bytes, rest
    _insert(blocks, rest)


@compiled
def _join(blocks: _Blocks, first: int, second: int) -> None:
    """Merge two neighbouring blocks into the first."""
    blocks.size_bytes[first] += blocks.size_bytes[second]
    after = blocks.after[second]
    blocks.after[first] = after
    if after != _NONE:
        blocks.before[after] = first


@inlined
def _release(blocks: _Blocks) -> None:
    """Release the segments that are one free block."""
    for kind in range(2):
        kept = 0
        for i in range(blocks.counts[kind]):
            block = blocks.free[kind, i]
            if blocks.before[block] == _NONE and blocks.after[block] == _NONE:
                blocks.counts[_RESERVED] -= blocks.size_bytes[block]
            else:
                blocks.free[kind, kept] = block
                kept += 1
        blocks.counts[kind] = kept


@inlined
def _allocate(blocks: _Blocks, size_bytes: int, limit_bytes: float) -> int:
    """Return the block that holds `size_bytes`."""
    size = max(_BLOCK_BYTES, -(-size_bytes // _BLOCK_BYTES) * _BLOCK_BYTES)
    is_small = size <= _SMALL_BYTES
    kind = int(is_small)
    place = _place(blocks, kind, size, -1)
    if place < blocks.counts[kind]:
        block = int(blocks.free[kind, place])
        _remove(blocks, block)
    else:
        segment = -(-size // _SEGMENT_BYTES) * _SEGMENT_BYTES
        if not is_small and size < _LARGE_BYTES:
            segment = _SHARED_BYTES
        if blocks.counts[_RESERVED] + segment > limit_bytes:
            _release(blocks)
        blocks.counts[_RESERVED] += segment
        block = _new_block(blocks, blocks.counts[_NEXT_ADDRESS], segment, is_small)
        blocks.counts[_NEXT_ADDRESS] += segment
    rest = blocks.size_bytes[block] - size
    if rest >= _BLOCK_BYTES if is_small else rest > _SMALL_BYTES:
        _split(blocks, block, size)
    return block


@inlined
def _free(blocks: _Blocks, block: int) -> None:
    """Free a block and merge it with free neighbours."""
    after, before = blocks.after[block], blocks.before[block]
    if after != _NONE and blocks.is_free[after]:
        _remove(blocks, after)
        _join(blocks, block, after)
    if before != _NONE and blocks.is_free[before]:
        _remove(blocks, before)
        _join(blocks, before, block)
        block = before
    _insert(blocks, block)


@compiled
def allocator_loop(
    blocks: _Blocks,
    size_bytes: IntArray,
    events: IntArray,
    limit_bytes: float,
    run: AllocatorRun,
) -> None:
    """Fill `run`; see `run_allocator`."""
    used_bytes = 0
    for event in range(len(events)):
        tensor = events[event]
        if tensor >= 0:
            block = _allocate(blocks, size_bytes[tensor], limit_bytes)
            blocks.of_tensor[tensor] = block
            used_bytes += blocks.size_bytes[block]
        else:
            block = blocks.of_tensor[~tensor]
            used_bytes -= blocks.size_bytes[block]
            _free(blocks, block)
        run.address[event] = blocks.address[block]
        run.allocated_bytes[event] = used_bytes
        run.reserved_bytes[event] = blocks.counts[_RESERVED]
