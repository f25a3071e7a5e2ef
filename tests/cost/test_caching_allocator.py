"""The model of torch's allocator, against the rules at the top of CUDACachingAllocator.cpp."""

import math
import random
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest

from fxpart.cost.caching_allocator import AllocatorRun, run_allocator

MIB = 2**20


def _run(
    sizes: Sequence[int], events: Sequence[int], limit_bytes: float = math.inf
) -> AllocatorRun:
    return run_allocator(np.array(sizes), np.array(events), limit_bytes)


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
    assert _run([size_bytes], [0]).reserved_bytes.tolist() == [reserved_bytes]


def test_block_sizes_are_multiples_of_512_bytes() -> None:
    assert _run([1, 512, 513], [0, 1, 2]).allocated_bytes.tolist() == [512, 1024, 2048]


def test_small_and_large_blocks_use_separate_segments() -> None:
    run = _run([512 * 1024] * 4 + [4 * MIB] * 5 + [1], range(10))
    assert run.reserved_bytes.tolist() == [2 * MIB] * 4 + [22 * MIB] * 5 + [24 * MIB]


def test_freed_blocks_are_reused_and_merged() -> None:
    # Three adjacent blocks of 5 MiB hold 15, and the rest of the segment is used.
    run = _run([5 * MIB] * 4 + [15 * MIB, 2 * MIB], [0, 1, 2, 3, ~0, ~2, ~1, 4, 5])
    assert run.reserved_bytes[-2:].tolist() == [20 * MIB, 40 * MIB]


def test_a_gap_is_lost_to_a_larger_block() -> None:
    run = _run([5 * MIB] * 4 + [9 * MIB], [0, 1, 2, 3, ~0, ~2, 4])
    assert run.reserved_bytes[-1] == 40 * MIB


def test_the_smallest_sufficient_block_is_used() -> None:
    sizes = [40 * MIB, 12 * MIB, 11 * MIB + 512, 12 * MIB, 28 * MIB]
    run = _run(sizes, [0, 1, ~0, ~1, 2, 3, 4])
    large, small, *_, third, fourth, fifth = run.address.tolist()
    assert (third, fourth) == (small, large)
    # Of the 40 MiB 28 remain: more than a MiB, so they were split off.
    assert fifth == large + 12 * MIB
    assert run.reserved_bytes[-1] == 52 * MIB


def test_a_remainder_of_a_mib_stays_with_its_block() -> None:
    run = _run([11 * MIB], [0, ~0])
    assert run.reserved_bytes.tolist() == [12 * MIB, 12 * MIB]
    assert run.allocated_bytes.tolist() == [12 * MIB, 0]


def test_blocks_never_overlap_and_all_memory_is_returned() -> None:
    chance = random.Random(0)
    choices = [100, 5000, 900_000, 1_500_000, 3 * MIB, 12 * MIB, 40 * MIB]
    sizes: list[int] = []
    events: list[int] = []
    live: list[int] = []
    for _ in range(3000):
        if live and chance.random() < 0.5:
            events.append(~live.pop(chance.randrange(len(live))))
        else:
            live.append(len(sizes))
            events.append(len(sizes))
            sizes.append(chance.choice(choices))
    # Merged again: a block as large as any earlier one needs no new segment.
    events += [~tensor for tensor in live] + [len(sizes)]
    run = _run([*sizes, 40 * MIB], events)
    assert run.allocated_bytes[-2] == 0
    assert run.reserved_bytes[-1] == run.reserved_bytes[-2]
    start_of: dict[int, int] = {}
    for event, address, reserved in zip(
        events[:3000], run.address.tolist(), run.reserved_bytes.tolist(), strict=False
    ):
        if event < 0:
            assert start_of.pop(~event) == address
        else:
            start_of[event] = address
        ends = sorted((start, start + sizes[tensor]) for tensor, start in start_of.items())
        assert all(end <= start for (_, end), (start, _) in pairwise(ends))
        assert not ends or ends[-1][1] <= reserved


def test_near_the_limit_unused_segments_are_released() -> None:
    # The first block is in a segment of 20 MiB that stays.
    sizes = [5 * MIB, 30 * MIB, 40 * MIB, 50 * MIB]
    run = _run(sizes, [0, 1, ~1, 2, ~0, 3], limit_bytes=60 * MIB)
    # Memory in use cannot be released: torch would be out of memory.
    assert run.reserved_bytes.tolist() == [size * MIB for size in (20, 50, 50, 60, 60, 90)]
    assert run.allocated_bytes[-1] == 90 * MIB
