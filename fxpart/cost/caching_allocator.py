"""`CachingAllocator`: a model of torch's CUDA allocator.

Torch allocates segments from the driver, splits them into blocks and caches freed blocks, so it
reserves more than its tensors take. Sizes and rules are those of ``c10/cuda/CUDACachingAllocator``
with default settings, for one stream.
"""

import math
from bisect import bisect_left, insort
from dataclasses import dataclass

__all__ = ["BLOCK_BYTES", "CachingAllocator", "block_bytes"]

BLOCK_BYTES = 512
"""Every allocation is rounded up to a multiple of this (``kMinBlockSize``)."""
_SEGMENT_BYTES = 2 * 2**20
"""Segments are multiples of this (``kSmallBuffer``, ``kRoundLarge``)."""
_SMALL_BYTES = 2**20
"""Blocks up to this size share segments of 2 MiB (``kSmallSize``)."""
_SHARED_BYTES = 20 * 2**20
"""Larger blocks below the next size share segments of this size (``kLargeBuffer``)."""
_LARGE_BYTES = 10 * 2**20
"""From this size on, a block has its own segment (``kMinLargeAlloc``)."""


def block_bytes(size_bytes: int) -> int:
    """Return the size of the block that holds `size_bytes`."""
    return max(BLOCK_BYTES, -(-size_bytes // BLOCK_BYTES) * BLOCK_BYTES)


def _segment_bytes(size_bytes: int) -> int:
    """Return the size of a new segment for a block of `size_bytes`."""
    if size_bytes <= _SMALL_BYTES:
        return _SEGMENT_BYTES
    if size_bytes < _LARGE_BYTES:
        return _SHARED_BYTES
    return -(-size_bytes // _SEGMENT_BYTES) * _SEGMENT_BYTES


@dataclass(slots=True)
class _Block:
    """A block of a segment; its neighbours are addresses, None at the ends of the segment."""

    size_bytes: int
    is_small: bool
    """Whether its segment is shared by small blocks."""
    is_free: bool
    before: int | None
    after: int | None


class CachingAllocator:
    """The segments and blocks of one device. Addresses increase with each segment."""

    def __init__(self, limit_bytes: float = math.inf) -> None:
        """Begin without segments; `limit_bytes` is the memory available for them."""
        self.reserved_bytes = 0
        """Bytes in segments."""
        self.most_reserved_bytes = 0
        """Peak bytes in segments; above the limit if torch would run out of memory."""
        self.allocated_bytes = 0
        """Bytes in blocks that are in use."""
        self._limit_bytes = limit_bytes
        self._next_address = 0
        self._blocks: dict[int, _Block] = {}
        self._free: dict[bool, list[tuple[int, int]]] = {True: [], False: []}
        """Sorted (size, address) of free blocks, separately for small ones and others."""

    def allocate(self, size_bytes: int) -> int:
        """Allocate `size_bytes` from the smallest sufficient free block; return the address.

        If there is none, a new segment is allocated. O(free blocks).
        """
        size = block_bytes(size_bytes)
        is_small = size <= _SMALL_BYTES
        free = self._free[is_small]
        index = bisect_left(free, (size, -1))
        address = free.pop(index)[1] if index < len(free) else self._new_segment(size)
        block = self._blocks[address]
        block.is_free = False
        rest = block.size_bytes - size
        if rest >= BLOCK_BYTES if is_small else rest > _SMALL_BYTES:
            self._split(address, size)
        self.allocated_bytes += block.size_bytes
        return address

    def free(self, address: int) -> None:
        """Free the block at `address` and merge it with free neighbours. O(free blocks)."""
        block = self._blocks[address]
        self.allocated_bytes -= block.size_bytes
        block.is_free = True
        free = self._free[block.is_small]
        after, before = block.after, block.before
        if after is not None and self._blocks[after].is_free:
            del free[bisect_left(free, (self._blocks[after].size_bytes, after))]
            self._join(address, after)
        if before is not None and self._blocks[before].is_free:
            del free[bisect_left(free, (self._blocks[before].size_bytes, before))]
            self._join(before, address)
            address = before
        insort(free, (self._blocks[address].size_bytes, address))

    def _new_segment(self, size: int) -> int:
        """Allocate a segment for a block of `size`; return its address.

        If it would exceed the limit, all unused segments are released first
        (``release_cached_blocks``).
        """
        address, segment = self._next_address, _segment_bytes(size)
        if self.reserved_bytes + segment > self._limit_bytes:
            self._release()
        self._next_address += segment
        self.reserved_bytes += segment
        self.most_reserved_bytes = max(self.most_reserved_bytes, self.reserved_bytes)
        self._blocks[address] = _Block(segment, size <= _SMALL_BYTES, False, None, None)
        return address

    def _release(self) -> None:
        for is_small, free in self._free.items():
            still_cached: list[tuple[int, int]] = []
            for size, address in free:
                block = self._blocks[address]
                if block.before is None and block.after is None:
                    del self._blocks[address]
                    self.reserved_bytes -= size
                else:
                    still_cached.append((size, address))
            self._free[is_small] = still_cached

    def _split(self, address: int, size: int) -> None:
        """Shrink the block at `address` to `size`; the remainder becomes free."""
        block, rest = self._blocks[address], address + size
        remaining_bytes = block.size_bytes - size
        self._blocks[rest] = _Block(remaining_bytes, block.is_small, True, address, block.after)
        if block.after is not None:
            self._blocks[block.after].before = rest
        block.size_bytes, block.after = size, rest
        insort(self._free[block.is_small], (remaining_bytes, rest))

    def _join(self, first: int, second: int) -> None:
        """Merge two neighbouring blocks, at the address of the first."""
        block, other = self._blocks[first], self._blocks.pop(second)
        block.size_bytes += other.size_bytes
        block.after = other.after
        if other.after is not None:
            self._blocks[other.after].before = first
