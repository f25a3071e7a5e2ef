"""Stages that share the cores of one machine."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxpart.errors import SpecError
from fxpart.schedule import StageCost, StageLink, simulate_schedule, step_on_cores


def _equal(devices: int) -> list[StageCost]:
    return [StageCost(s, 1.0, 1.0) for s in range(devices)]


def test_one_core_does_everything_one_after_another() -> None:
    assert step_on_cores("gpipe", _equal(3), [], 4, 1, training=False) == pytest.approx(12)
    assert step_on_cores("1f1b", _equal(3), [], 4, 1, training=True) == pytest.approx(24)


def test_two_cores_by_hand() -> None:
    # F0 alone for a second, then two at a time, then three that share two cores:
    # stage 0: F0 0-1, F1 1-2, F2 2-3.5; stage 1: F0 1-2, F1 2-3.5, F2 3.5-4.5;
    # stage 2: F0 2-3.5, F1 3.5-4.5, F2 4.5-5.5.
    assert step_on_cores("gpipe", _equal(3), [], 3, 2, training=False) == pytest.approx(5.5)


def test_a_transfer_needs_no_core() -> None:
    links = [StageLink("F", 0, 1, 8, 10.0)]
    # Two forwards end at 1 and 2; one link carries them to 11 and 21; the last ends at 22.
    assert step_on_cores("gpipe", _equal(2), links, 2, 1, training=False) == pytest.approx(22)


@given(
    name=st.sampled_from(["gpipe", "1f1b"]),
    times=st.lists(st.integers(0, 4), min_size=2, max_size=8),
    sends=st.lists(st.integers(0, 3), min_size=8, max_size=8),
    microbatches=st.integers(1, 6),
    training=st.booleans(),
)
def test_few_cores_are_no_faster_than_devices_and_enough_are_as_fast(
    name: str, times: list[int], sends: list[int], microbatches: int, training: bool
) -> None:
    count = len(times) // 2
    costs = [StageCost(s, float(times[2 * s]), float(times[2 * s + 1])) for s in range(count)]
    links = [StageLink("F", s, s + 1, 1, float(sends[s])) for s in range(count - 1)]
    links += [StageLink("B", s + 1, s, 1, float(sends[4 + s % 4])) for s in range(count - 1)]
    whole = simulate_schedule(name, costs, links, microbatches, training=training)
    found = [
        step_on_cores(name, costs, links, microbatches, cores, training=training)
        for cores in range(1, count + 2)
    ]
    assert found[-1] == found[-2] == pytest.approx(whole.step_s)
    work_s = sum(whole.busy_s)
    for cores, step_s in enumerate(found, 1):
        assert step_s >= max(work_s / cores, whole.step_s) - 1e-9


def test_no_core_is_refused() -> None:
    with pytest.raises(SpecError, match="needs a core to run on, got cores=0"):
        step_on_cores("gpipe", _equal(2), [], 2, 0, training=False)
