"""`CachingAllocator`: what torch's allocator reserves of a CUDA device for a run of allocations.

Torch asks the driver for segments, cuts them into blocks and keeps what is freed for later, so that
a device holds more than its tensors. Sizes and rules are those of ``c10/cuda/CUDACachingAllocator``
with its default settings, for one stream.
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
"""The segment that larger ones share (``kLargeBuffer``) below the next size."""
_LARGE_BYTES = 10 * 2**20
"""From this size on, a block has a segment of its own (``kMinLargeAlloc``)."""


def block_bytes(size_bytes: int) -> int:
    """Return the size of the block that holds `size_bytes`."""
    return max(BLOCK_BYTES, -(-size_bytes // BLOCK_BYTES) * BLOCK_BYTES)


def _segment_bytes(size_bytes: int) -> int:
    """Return the size of the segment that is made for a block of `size_bytes`."""
    if size_bytes <= _SMALL_BYTES:
        return _SEGMENT_BYTES
    if size_bytes < _LARGE_BYTES:
        return _SHARED_BYTES
    return -(-size_bytes // _SEGMENT_BYTES) * _SEGMENT_BYTES


@dataclass(slots=True)
class _Block:
    """A piece of a segment; its neighbours there are addresses, None at the segment's ends."""

    size_bytes: int
    is_small: bool
    """Whether its segment is one of those that small blocks share."""
    is_free: bool
    before: int | None
    after: int | None


class CachingAllocator:
    """Blocks in the segments of one device. Addresses are numbers that grow with each segment."""

    def __init__(self, limit_bytes: float = math.inf) -> None:
        """Begin with no segment; `limit_bytes` is what the device has for them."""
        self.reserved_bytes = 0
        """In segments."""
        self.most_reserved_bytes = 0
        """In segments, the most at any time; above the limit where torch would be out of memory."""
        self.allocated_bytes = 0
        """In blocks that are in use."""
        self._limit_bytes = limit_bytes
        self._next_address = 0
        self._blocks: dict[int, _Block] = {}
        self._free: dict[bool, list[tuple[int, int]]] = {True: [], False: []}
        """(size, address) of the free blocks, sorted: small ones, and the others."""

    def allocate(self, size_bytes: int) -> int:
        """Return the address of a block for `size_bytes`: in the smallest free one that has room.

        Without one, a segment is made. O(free blocks).
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
        """Give the block at `address` back, joined with the free ones beside it. O(free blocks)."""
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
        """Return the address of a new segment that has room for a block of `size`.

        Where the device has no room for it, all segments without a block in use are given back
        first (``release_cached_blocks``).
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
            kept: list[tuple[int, int]] = []
            for size, address in free:
                block = self._blocks[address]
                if block.before is None and block.after is None:
                    del self._blocks[address]
                    self.reserved_bytes -= size
                else:
                    kept.append((size, address))
            self._free[is_small] = kept

    def _split(self, address: int, size: int) -> None:
        """Cut the block at `address` to `size`; what is left of it becomes free."""
        block, rest = self._blocks[address], address + size
        left = block.size_bytes - size
        self._blocks[rest] = _Block(left, block.is_small, True, address, block.after)
        if block.after is not None:
            self._blocks[block.after].before = rest
        block.size_bytes, block.after = size, rest
        insort(self._free[block.is_small], (left, rest))

    def _join(self, first: int, second: int) -> None:
        """Make one block of two neighbours, at the address of the first."""
        block, other = self._blocks[first], self._blocks.pop(second)
        block.size_bytes += other.size_bytes
        block.after = other.after
        if other.after is not None:
            self._blocks[other.after].before = first
