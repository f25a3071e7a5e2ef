"""The model of torch's allocator, against the rules at the top of CUDACachingAllocator.cpp."""

import random
from itertools import pairwise

import pytest

from fxpart.cost.caching_allocator import CachingAllocator, block_bytes

MIB = 2**20


@pytest.mark.parametrize(
    ("size_bytes", "reserved_bytes"),
    [
        (1, 2 * MIB),
        (MIB, 2 * MIB),
        (MIB + 1, 20 * MIB),
        (10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB),
        (10 * MIB + 1, 12 * MIB),
        (201 * MIB, 202 * MIB),
    ],
)
def test_the_segment_size_of_a_first_block(size_bytes: int, reserved_bytes: int) -> None:
    allocator = CachingAllocator()
    allocator.allocate(size_bytes)
    assert allocator.reserved_bytes == reserved_bytes


def test_block_sizes_are_multiples_of_512_bytes() -> None:
    assert [block_bytes(size) for size in (1, 512, 513)] == [512, 512, 1024]


def test_small_and_large_blocks_use_separate_segments() -> None:
    allocator = CachingAllocator()
    for _ in range(4):
        allocator.allocate(512 * 1024)
    assert allocator.reserved_bytes == 2 * MIB
    for _ in range(5):
        allocator.allocate(4 * MIB)
    assert allocator.reserved_bytes == 22 * MIB
    allocator.allocate(1)
    assert allocator.reserved_bytes == 24 * MIB


def test_freed_blocks_are_reused_and_merged() -> None:
    allocator = CachingAllocator()
    blocks = [allocator.allocate(5 * MIB) for _ in range(4)]
    for index in (0, 2, 1):
        allocator.free(blocks[index])
    # Three adjacent blocks of 5 MiB hold 15, and the rest of the segment is used.
    allocator.allocate(15 * MIB)
    assert allocator.reserved_bytes == 20 * MIB
    allocator.allocate(2 * MIB)
    assert allocator.reserved_bytes == 40 * MIB


def test_a_gap_is_lost_to_a_larger_block() -> None:
    allocator = CachingAllocator()
    blocks = [allocator.allocate(5 * MIB) for _ in range(4)]
    allocator.free(blocks[0])
    allocator.free(blocks[2])
    allocator.allocate(9 * MIB)
    assert allocator.reserved_bytes == 40 * MIB


def test_the_smallest_sufficient_block_is_used() -> None:
    allocator = CachingAllocator()
    large, small = allocator.allocate(40 * MIB), allocator.allocate(12 * MIB)
    allocator.free(large)
    allocator.free(small)
    assert allocator.allocate(11 * MIB + 512) == small
    assert allocator.allocate(12 * MIB) == large
    # Of the 40 MiB 28 remain: more than a MiB, so they were split off.
    assert allocator.allocate(28 * MIB) == large + 12 * MIB
    assert allocator.reserved_bytes == 52 * MIB


def test_a_remainder_of_a_mib_stays_with_its_block() -> None:
    allocator = CachingAllocator()
    address = allocator.allocate(11 * MIB)
    assert allocator.reserved_bytes == 12 * MIB
    assert allocator.allocated_bytes == 12 * MIB
    allocator.free(address)
    assert allocator.allocated_bytes == 0


def test_blocks_never_overlap_and_all_memory_is_returned() -> None:
    chance, allocator = random.Random(0), CachingAllocator()
    live: dict[int, int] = {}
    for _ in range(3000):
        if live and chance.random() < 0.5:
            address = chance.choice(sorted(live))
            del live[address]
            allocator.free(address)
        else:
            size = chance.choice([100, 5000, 900_000, 1_500_000, 3 * MIB, 12 * MIB, 40 * MIB])
            address = allocator.allocate(size)
            assert address not in live
            live[address] = size
        ends = sorted((start, start + size) for start, size in live.items())
        assert all(end <= start for (_, end), (start, _) in pairwise(ends))
        assert not ends or ends[-1][1] <= allocator.reserved_bytes
    for address in live:
        allocator.free(address)
    assert allocator.allocated_bytes == 0
    # Merged again: a block as large as any earlier one needs no new segment.
    before = allocator.reserved_bytes
    allocator.allocate(40 * MIB)
    assert allocator.reserved_bytes == before


def test_near_the_limit_unused_segments_are_released() -> None:
    allocator = CachingAllocator(limit_bytes=60 * MIB)
    live = allocator.allocate(5 * MIB)  # in a segment of 20 MiB that stays
    allocator.free(allocator.allocate(30 * MIB))
    allocator.allocate(40 * MIB)
    assert (allocator.reserved_bytes, allocator.most_reserved_bytes) == (60 * MIB, 60 * MIB)
    allocator.free(live)
    # Memory in use cannot be released: torch would be out of memory.
    allocator.allocate(50 * MIB)
    assert allocator.most_reserved_bytes == 90 * MIB
    assert allocator.allocated_bytes == 90 * MIB
