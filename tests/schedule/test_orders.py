"""The order of a step on each device: by hand, and against torch's own schedules."""

import re
from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

from fxpart.errors import SpecError
from fxpart.schedule import SCHEDULES, Action, ordered_actions

Rows = tuple[tuple[Action, ...], ...]


def _shown(rows: Rows) -> list[str]:
    return [" ".join(f"{a.kind}{a.microbatch}" for a in row) for row in rows]


def test_gpipe_runs_all_forwards_first() -> None:
    rows = ordered_actions("gpipe", 2, 1, 3, training=True)
    assert _shown(rows) == ["F0 F1 F2 B0 B1 B2"] * 2
    assert [row[0].stage for row in rows] == [0, 1]


def test_1f1b_alternates_after_as_many_forwards_as_stages_follow() -> None:
    assert _shown(ordered_actions("1f1b", 3, 1, 4, training=True)) == [
        "F0 F1 F2 B0 F3 B1 B2 B3",
        "F0 F1 B0 F2 B1 F3 B2 B3",
        "F0 B0 F1 B1 F2 B2 F3 B3",
    ]
    assert _shown(ordered_actions("1f1b", 3, 1, 1, training=True)) == ["F0 B0"] * 3


def test_interleaved_runs_a_round_through_one_stage_then_the_next() -> None:
    rows = ordered_actions("interleaved", 2, 2, 2, training=True)
    # Kind and micro-batch, then the stage.
    assert [" ".join(f"{a.kind}{a.microbatch}/{a.stage}" for a in row) for row in rows] == [
        "F0/0 F1/0 F0/2 F1/2 B0/2 B1/2 B0/0 B1/0",
        "F0/1 F1/1 F0/3 B0/3 F1/3 B1/3 B0/1 B1/1",
    ]


def test_inference_has_the_forwards_only() -> None:
    for name in SCHEDULES:
        rows = ordered_actions(name, 2, 1, 4, training=False)
        assert _shown(rows) == ["F0 F1 F2 F3"] * 2


@given(st.sampled_from(sorted(SCHEDULES)), st.integers(1, 6), st.integers(1, 4), st.integers(1, 5))
def test_every_action_runs_once_and_backwards_follow_forwards(
    name: str, devices: int, chunks: int, times: int
) -> None:
    chunks = chunks if name == "interleaved" else 1
    count = devices * times
    rows = ordered_actions(name, devices, chunks, count, training=True)
    for device, row in enumerate(rows):
        assert set(Counter(row).values()) == {1}
        assert len(row) == 2 * chunks * count
        assert all(a.stage % devices == device for a in row)
        position_of = {a: i for i, a in enumerate(row)}
        assert all(position_of[a] > position_of[a._replace(kind="F")] for a in row if a.kind == "B")
        for stage in range(device, chunks * devices, devices):
            for kind in "FB":
                order = [a.microbatch for a in row if a.kind == kind and a.stage == stage]
                assert order == list(range(count))


def _of_torch(actions: Sequence[object]) -> list[Action]:
    """Return the actions printed by torch, such as ``2F1``, as stage, kind and micro-batch."""
    matches = (re.fullmatch(r"(\d+)([FB])(\d+)", str(a)) for a in actions if a is not None)
    return [Action(m[2], int(m[3]), int(m[1])) for m in matches if m]


@pytest.mark.parametrize(("devices", "count"), [(1, 1), (2, 2), (2, 5), (4, 4), (4, 9), (6, 12)])
def test_gpipe_and_1f1b_equal_those_of_torch(devices: int, count: int) -> None:
    for name, kind in (("gpipe", ScheduleGPipe), ("1f1b", Schedule1F1B)):
        torch_schedule = kind.__new__(kind)
        torch_schedule._num_stages, torch_schedule._n_microbatches = devices, count
        order = torch_schedule._get_pipeline_order()
        assert order is not None
        rows = ordered_actions(name, devices, 1, count, training=True)
        for device, row in enumerate(rows):
            expected = _of_torch(order[device])
            if name == "1f1b" and device == devices - 1:
                # Torch's table (not its run) counts the last device's forwards from 1.
                expected = [
                    a._replace(microbatch=a.microbatch - 1) if a.kind == "F" else a
                    for a in expected
                ]
            assert list(row) == expected


@pytest.mark.parametrize(
    ("devices", "chunks", "count"),
    [(1, 1, 1), (1, 3, 2), (2, 1, 4), (2, 2, 4), (2, 3, 2), (4, 2, 8), (4, 2, 10), (4, 4, 3)],
)
def test_interleaved_equals_that_of_torch(devices: int, chunks: int, count: int) -> None:
    torch_schedule = ScheduleInterleaved1F1B.__new__(ScheduleInterleaved1F1B)
    torch_schedule.pp_group_size, torch_schedule.n_local_stages = devices, chunks
    torch_schedule._n_microbatches = count
    torch_schedule.number_of_rounds = max(1, count // devices)
    torch_schedule.microbatches_per_round = count // torch_schedule.number_of_rounds
    rows = ordered_actions("interleaved", devices, chunks, count, training=True)
    for device, row in enumerate(rows):
        assert list(row) == _of_torch(torch_schedule._calculate_single_rank_operations(device))


@pytest.mark.parametrize(
    ("name", "devices", "chunks", "count", "message"),
    [
        ("gpip", 2, 1, 4, "schedule=gpip does not exist; nearest: gpipe"),
        ("gpipe", 2, 1, 0, "microbatches must be at least 1, got 0"),
        ("gpipe", 2, 2, 4, "the placement has 4 stages on 2 devices; take schedule=interleaved"),
        ("1f1b", 3, 2, 4, "schedule=1f1b runs one stage on each device"),
        ("1f1b", 2, 26, 2, "or a mode that places one stage on each: mode=pipeline, or mode=equ"),
        ("interleaved", 2, 2, 5, "in 2 equal rounds, got microbatches=5; use 4 or 6"),
    ],
)
def test_invalid_combinations_are_refused(
    name: str, devices: int, chunks: int, count: int, message: str
) -> None:
    with pytest.raises(SpecError, match=message):
        ordered_actions(name, devices, chunks, count, training=True)
