"""Stages that share the cores of one machine."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxpart.errors import SpecError
from fxpart.schedule import (
    SCHEDULES,
    PipelineCosts,
    StageCost,
    StageLink,
    simulate_schedule,
    step_on_cores,
)
from tests.schedule.wrong_pipelines import NO_PIPELINES, no_pipeline, stuck_order


def _equal(devices: int, *links: StageLink, training: bool = False) -> PipelineCosts:
    stages = tuple(StageCost(s, 1.0, 1.0) for s in range(devices))
    return PipelineCosts(stages, links, training)


def test_one_core_runs_all_actions_in_sequence() -> None:
    assert step_on_cores("gpipe", _equal(3), 4, 1) == pytest.approx(12)
    assert step_on_cores("1f1b", _equal(3, training=True), 4, 1) == pytest.approx(24)


def test_two_cores_by_hand() -> None:
    # F0 alone for a second, then two at a time, then three that share two cores:
    # stage 0: F0 0-1, F1 1-2, F2 2-3.5; stage 1: F0 1-2, F1 2-3.5, F2 3.5-4.5;
    # stage 2: F0 2-3.5, F1 3.5-4.5, F2 4.5-5.5.
    assert step_on_cores("gpipe", _equal(3), 3, 2) == pytest.approx(5.5)


def test_a_transfer_needs_no_core() -> None:
    costs = _equal(2, StageLink("F", 0, 1, 8, 10.0))
    # Two forwards end at 1 and 2; one link carries them to 11 and 21; the last ends at 22.
    assert step_on_cores("gpipe", costs, 2, 1) == pytest.approx(22)


def test_updates_are_ignored() -> None:
    stages = tuple(StageCost(s, 1.0, 1.0, update_s=7.0) for s in range(2))
    costs = PipelineCosts(stages, (), training=True)
    assert step_on_cores("gpipe", costs, 3, 1) == pytest.approx(12)


@given(
    name=st.sampled_from(["gpipe", "1f1b"]),
    times=st.lists(st.integers(0, 4), min_size=2, max_size=8),
    sends=st.lists(st.integers(0, 3), min_size=8, max_size=8),
    microbatches=st.integers(1, 6),
    training=st.booleans(),
)
def test_few_cores_are_no_faster_than_devices_and_enough_are_equal(
    name: str, times: list[int], sends: list[int], microbatches: int, training: bool
) -> None:
    count = len(times) // 2
    stages = [StageCost(s, float(times[2 * s]), float(times[2 * s + 1])) for s in range(count)]
    links = [StageLink("F", s, s + 1, 1, float(sends[s])) for s in range(count - 1)]
    links += [StageLink("B", s + 1, s, 1, float(sends[4 + s % 4])) for s in range(count - 1)]
    costs = PipelineCosts(tuple(stages), tuple(links), training)
    whole = simulate_schedule(name, costs, microbatches)
    steps_s = [step_on_cores(name, costs, microbatches, cores) for cores in range(1, count + 2)]
    assert steps_s[-1] == steps_s[-2] == pytest.approx(whole.step_s)
    work_s = sum(whole.busy_s)
    for cores, step_s in enumerate(steps_s, 1):
        assert step_s >= max(work_s / cores, whole.step_s) - 1e-9


def test_zero_cores_are_refused() -> None:
    with pytest.raises(SpecError, match="needs a core to run on, got cores=0"):
        step_on_cores("gpipe", _equal(2), 2, 0)


@pytest.mark.parametrize(("homes", "links", "message"), NO_PIPELINES)
def test_an_invalid_pipeline_is_refused(
    homes: list[int], links: list[StageLink], message: str
) -> None:
    with pytest.raises(SpecError, match=message):
        step_on_cores("interleaved", no_pipeline(homes, links), 2, 4)


def test_a_deadlocked_order_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(SCHEDULES, "stuck", stuck_order)
    with pytest.raises(RuntimeError, match="the order of a schedule is wrong: 3 actions never"):
        step_on_cores("stuck", _equal(2, training=True), 1, 2)
