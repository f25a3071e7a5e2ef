"""Replicas on idle devices: by hand, and invariants of every answer."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from fxpart.core.replicate import Homes, copies, replicate


def _replicate(used: list[int], homes: Homes, memory: list[int]) -> Homes:
    return replicate(np.array(used), homes, np.array(memory))


def test_the_smallest_idle_device_with_enough_memory_is_used() -> None:
    assert _replicate([10], ((0,),), [10, 30, 20]) == ((0, 2, 1),)


def test_a_round_that_one_device_cannot_join_is_dropped() -> None:
    # Device 2 could replicate device 0, but nothing can replicate device 1.
    assert _replicate([10, 20], ((0,), (1,)), [10, 20, 10, 15]) == ((0,), (1,))


def test_rounds_continue_while_all_partitions_fit() -> None:
    homes = _replicate([10, 20], ((0,), (1,)), [10, 20, 10, 20, 10, 20, 90])
    assert homes == ((0, 2, 4), (1, 3, 5))


def test_partitions_on_one_device_are_replicated_together() -> None:
    assert _replicate([10, 20], ((0,), (0,)), [30, 29, 30]) == ((0, 2), (0, 2))


def test_a_partition_on_several_devices_is_replicated_with_each() -> None:
    # As in sparse_nn: partition 2 is on both devices.
    homes = _replicate([10, 20, 5], ((0,), (1,), (0, 1)), [30] * 5)
    assert homes == ((0, 2), (1, 3), (0, 1, 2, 3))


def _bytes(*sizes: int) -> np.ndarray:
    return np.array(sizes, dtype=np.int64)


def test_each_round_uses_the_smallest_devices_that_fit() -> None:
    needed_bytes, memory = _bytes(5, 2, 0, 0, 0, 0, 0), _bytes(9, 9, 6, 2, 5, 3, 5)
    # 0 is copied by 4, then by 6; 1 by 3, then by 5; then only 2 is left.
    assert copies(needed_bytes, [0, 1], memory) == [[4, 6], [3, 5]]
    assert copies(needed_bytes, [0, 1], memory, max_rounds=1) == [[4], [3]]
    assert copies(needed_bytes, [0, 1], memory, max_rounds=0) == [[], []]


def test_rounds_end_when_one_partition_cannot_take_part() -> None:
    assert copies(_bytes(5, 2, 0, 0, 0, 0), [0, 1], _bytes(9, 9, 2, 2, 2, 2)) == [[], []]
    assert copies(_bytes(5, 2, 0, 0, 0, 0), [0, 1], _bytes(9, 9, 5, 5, 4, 1)) == [[2], [4]]


def test_unused_devices_are_not_replicated() -> None:
    assert copies(_bytes(0, 0), [], _bytes(9, 9)) == []


@given(
    st.lists(st.integers(1, 20), min_size=1, max_size=3),
    st.lists(st.integers(1, 60), min_size=0, max_size=9),
)
def test_replicas_fit_and_rounds_are_complete(used: list[int], idle: list[int]) -> None:
    memory = [*used, *idle]
    homes = _replicate(used, tuple((p,) for p in range(len(used))), memory)
    given_out = [d for devices in homes for d in devices]
    assert len(given_out) == len(set(given_out))
    assert all(memory[d] >= used[p] for p, devices in enumerate(homes) for d in devices)
    rounds = {len(devices) for devices in homes}
    assert len(rounds) == 1
    # No further round was possible for a single used device.
    if len(used) == 1:
        free = [d for d in range(len(memory)) if d not in given_out]
        assert all(memory[d] < used[0] for d in free)
