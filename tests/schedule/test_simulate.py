"""A simulated step: tables drawn by hand, known bubbles, and invariants."""

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxpart.errors import SpecError
from fxpart.schedule import (
    SCHEDULES,
    PipelineCosts,
    ScheduleResult,
    StageCost,
    StageLink,
    least_interleaved_share,
    least_step_s,
    simulate_schedule,
)
from tests.schedule.wrong_pipelines import NO_PIPELINES, no_pipeline, stuck_order


def _step(
    stages: Sequence[StageCost], links: Sequence[StageLink] = (), *, training: bool = True
) -> PipelineCosts:
    return PipelineCosts(tuple(stages), tuple(links), training)


def _equal(devices: int, chunks: int = 1, *, training: bool = True, **more: Any) -> PipelineCosts:  # noqa: ANN401
    """Return stages whose forward and backward take a second each."""
    stages = [StageCost(s % devices, 1.0, 1.0, **more) for s in range(devices * chunks)]
    return _step(stages, training=training)


def _drawn(result: ScheduleResult) -> list[str]:
    """Return a line for each device with a letter and number per second; ``--`` while it waits."""
    lines = [["--"] * round(result.step_s) for _ in result.devices]
    for event in result.events:
        row_index = result.devices.index(event.device)
        for second in range(round(event.start_s), round(event.finish_s)):
            lines[row_index][second] = f"{event.kind}{event.microbatch}"
    return [" ".join(line) for line in lines]


def test_gpipe_drawn_by_hand() -> None:
    result = simulate_schedule("gpipe", _equal(3), 3)
    assert _drawn(result) == [
        "F0 F1 F2 -- -- -- -- B0 B1 B2",
        "-- F0 F1 F2 -- -- B0 B1 B2 --",
        "-- -- F0 F1 F2 B0 B1 B2 -- --",
    ]
    assert result.step_s == 10
    assert result.throughput_per_s == pytest.approx(0.3)
    assert result.busy_s == (6, 6, 6)


def test_1f1b_drawn_by_hand() -> None:
    assert _drawn(simulate_schedule("1f1b", _equal(3), 4)) == [
        "F0 F1 F2 -- -- B0 F3 B1 -- B2 -- B3",
        "-- F0 F1 -- B0 F2 B1 F3 B2 -- B3 --",
        "-- -- F0 B0 F1 B1 F2 B2 F3 B3 -- --",
    ]


def test_interleaved_drawn_by_hand() -> None:
    # Stages 0 and 2 on the first device, 1 and 3 on the second.
    result = simulate_schedule("interleaved", _equal(2, 2), 2)
    assert _drawn(result) == [
        "F0 F1 F0 F1 -- B0 -- B1 B0 B1",
        "-- F0 F1 F0 B0 F1 B1 B0 B1 --",
    ]
    assert result.bubble_fraction == pytest.approx(1 / 5)


@pytest.mark.parametrize(("p", "m"), [(1, 3), (2, 2), (3, 3), (4, 8), (5, 17), (8, 64)])
def test_the_bubble_equals_that_of_the_papers(p: int, m: int) -> None:
    for name in ("gpipe", "1f1b"):
        result = simulate_schedule(name, _equal(p), m)
        assert result.bubble_fraction == pytest.approx((p - 1) / (m + p - 1))
    forward = simulate_schedule("gpipe", _equal(p, training=False), m)
    assert forward.step_s == m + p - 1
    assert forward.bubble_fraction == pytest.approx((p - 1) / (m + p - 1))


@pytest.mark.parametrize(("p", "v", "m"), [(1, 2, 3), (2, 2, 2), (4, 2, 8), (4, 3, 4), (3, 4, 12)])
def test_the_bubble_of_interleaved_equals_that_of_the_paper(p: int, v: int, m: int) -> None:
    result = simulate_schedule("interleaved", _equal(p, v), m)
    assert result.bubble_fraction == pytest.approx((p - 1) / (v * m + p - 1))


@pytest.mark.parametrize(("p", "m"), [(2, 2), (4, 8), (4, 2), (5, 17)])
def test_activations_waiting_for_their_backward_are_counted(p: int, m: int) -> None:
    costs = _equal(
        p,
        saved_bytes=10,
        forward_peak_bytes=10,
        backward_peak_bytes=10,
        first_backward_peak_bytes=10,
    )
    assert simulate_schedule("gpipe", costs, m).peak_bytes == (10 * m,) * p
    expected = tuple(10 * min(m, p - stage) for stage in range(p))
    assert simulate_schedule("1f1b", costs, m).peak_bytes == expected


def test_memory_by_hand() -> None:
    # Distinct primes, so that no term can stand in for another.
    cost = StageCost(
        0,
        1.0,
        1.0,
        weight_bytes=1009,
        gradient_bytes=503,
        input_bytes=3,
        output_bytes=7,
        saved_bytes=11,
        forward_peak_bytes=29,
        backward_peak_bytes=17,
        first_backward_peak_bytes=523,
    )
    resident = 1009 + 3 * 3
    forwards = [resident + i * (7 + 11) + 29 for i in range(3)]
    # Three results; at first two others have saved, then one, then none; and there are gradients.
    first = resident + 3 * 7 + 2 * 11 + 523
    later = resident + 3 * 7 + 1 * 11 + 503 + 17
    assert first > later > max(forwards)
    assert simulate_schedule("gpipe", _step([cost]), 3).peak_bytes == (first,)
    inference = simulate_schedule("gpipe", _step([cost], training=False), 3)
    assert inference.peak_bytes == (forwards[-1],)
    # In sequence: the third forward has gradients and two results besides it.
    assert simulate_schedule("1f1b", _step([cost]), 3).peak_bytes == (resident + 503 + 2 * 7 + 29,)


def test_transfers_overlap_computation_and_queue_on_a_link() -> None:
    # Forwards of 1 s; the link takes 3 s per micro-batch, so the second waits 2 s for it.
    stages = [StageCost(4, 1.0), StageCost(7, 1.0)]
    costs = _step(stages, [StageLink("F", 0, 1, 99, 3.0)], training=False)
    result = simulate_schedule("gpipe", costs, 2)
    assert [(t.start_s, t.finish_s) for t in result.transfers] == [(1, 4), (4, 7)]
    assert [(e.device, e.start_s) for e in result.events] == [(4, 0), (4, 1), (7, 4), (7, 7)]
    assert result.step_s == 8
    assert result.devices == (4, 7)
    assert result.transfers[0][:5] == (0, 1, "F", 0, 99)


def test_a_value_read_by_a_later_stage_is_sent_there_directly() -> None:
    stages = [StageCost(d, 1.0) for d in range(3)]
    links = [StageLink("F", 0, 2, 1, 5.0), StageLink("F", 1, 2, 1, 1.0)]
    assert (
        simulate_schedule("gpipe", _step(stages, links, training=False), 1).events[-1].start_s == 6
    )


@st.composite
def _pipelines(draw: st.DrawFn) -> tuple[int, int, int, PipelineCosts]:
    """Return devices, stages per device, micro-batches, and the costs of random stages."""
    devices, chunks = draw(st.integers(1, 5)), draw(st.integers(1, 3))
    count = devices * draw(st.integers(1, 4))
    rng = np.random.default_rng(draw(st.integers(0, 10_000)))

    def stage(number: int) -> StageCost:
        saved, extra = int(rng.integers(20)), rng.integers(9, size=2)
        return StageCost(
            number % devices,
            float(rng.integers(5)),
            float(rng.integers(1, 9)),
            saved_bytes=saved,
            forward_peak_bytes=saved + int(extra[0]),
            backward_peak_bytes=saved + int(extra[1]),
            first_backward_peak_bytes=saved + int(extra[1]),
        )

    stages = devices * chunks
    pairs = itertools.combinations(range(stages), 2) if devices > 1 else []
    links = []
    for a, b in pairs:
        if (b - a) % devices and (b == a + 1 or rng.random() < 0.2):
            links.append(StageLink("F", a, b, 1, float(rng.integers(4))))
            links.append(StageLink("B", b, a, 1, float(rng.integers(4))))
    return devices, chunks, count, _step([stage(s) for s in range(stages)], links)


@given(_pipelines())
def test_invariants_of_any_pipeline(
    case: tuple[int, int, int, PipelineCosts],
) -> None:
    devices, chunks, count, costs = case
    names = ["interleaved", "gpipe", "1f1b"] if chunks == 1 else ["interleaved"]
    results = {name: simulate_schedule(name, costs, count) for name in names}
    for result in results.values():
        events = {(e.kind, e.stage, e.microbatch): e for e in result.events}
        assert len(events) == len(result.events) == 2 * len(costs.stages) * count
        for event in result.events:
            cost = costs.stages[event.stage]
            spent = cost.forward_s if event.kind == "F" else cost.backward_s
            assert event.finish_s == event.start_s + spent
            step = -1 if event.kind == "F" else 1
            before = events.get((event.kind, event.stage + step, event.microbatch))
            assert before is None or before.finish_s <= event.start_s
            if event.kind == "B":
                assert events["F", event.stage, event.microbatch].finish_s <= event.start_s
        assert len(result.transfers) == len(costs.links) * count
        for sent in result.transfers:
            assert events[sent.kind, sent.source, sent.microbatch].finish_s <= sent.start_s
            assert sent.finish_s <= events[sent.kind, sent.target, sent.microbatch].start_s
        _one_at_a_time([(e.device, e.start_s, e.finish_s) for e in result.events])
        _one_at_a_time(
            [
                (t.source % devices * devices + t.target % devices, t.start_s, t.finish_s)
                for t in result.transfers
            ]
        )
        assert result.step_s >= max(result.busy_s)
        assert result.step_s >= sum(c.forward_s + c.backward_s for c in costs.stages)
        assert 0 <= result.bubble_fraction < 1
    work_s = sum(c.forward_s + c.backward_s for c in costs.stages)
    for result in results.values():
        share = least_interleaved_share(devices, chunks, count)
        assert result.step_s >= work_s * share * (1 - 1e-12)
    if chunks == 1:
        for result in results.values():
            assert result.step_s >= least_step_s(work_s, devices, count) * (1 - 1e-12)
        # The same without gradients: a forward after a backward coexists with them.
        pairs = zip(results["1f1b"].peak_bytes, results["gpipe"].peak_bytes, strict=True)
        assert all(peak <= limit for peak, limit in pairs)


def test_the_interleaved_bound_is_known_for_few_stages() -> None:
    assert least_interleaved_share(4, 1, 8) == pytest.approx(least_step_s(1.0, 4, 8))
    # A microbatch alone passes all stages one after another.
    assert least_interleaved_share(4, 2, 1) == pytest.approx(1)
    assert least_interleaved_share(1, 3, 5) == 5
    # The rows of A are 2020, 1202, 1120 and 1112: stages of 2, 2, 2 and 1 take 8 by each.
    assert least_interleaved_share(2, 2, 2) == pytest.approx(8 / 7)


def _one_at_a_time(spans: list[tuple[int, float, float]]) -> None:
    for (key, _, finish), (other, start, _) in itertools.pairwise(sorted(spans)):
        assert key != other or finish <= start


def test_a_simulation_is_deterministic() -> None:
    links = [StageLink("F", 0, 1, 1, 0.5), StageLink("B", 1, 0, 1, 0.25)]
    first, second = (simulate_schedule("1f1b", _step(_equal(2).stages, links), 5) for _ in range(2))
    assert first == second


def test_a_step_without_work_takes_no_time() -> None:
    result = simulate_schedule("gpipe", _step([StageCost(0, 0.0)], training=False), 2)
    assert (result.step_s, result.bubble_fraction) == (0, 0)
    assert result.throughput_per_s == float("inf")


@pytest.mark.parametrize(("homes", "links", "message"), NO_PIPELINES)
def test_an_invalid_pipeline_is_refused(
    homes: list[int], links: list[StageLink], message: str
) -> None:
    with pytest.raises(SpecError, match=message):
        simulate_schedule("interleaved", no_pipeline(homes, links), 2)


def test_a_deadlocked_order_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SCHEDULES, "stuck", stuck_order)
    with pytest.raises(RuntimeError, match="the order of a schedule is wrong: 3 actions never"):
        simulate_schedule("stuck", _equal(2), 1)


@pytest.mark.parametrize("time_s", [float("nan"), float("inf"), -1.0])
def test_invalid_times_are_refused(time_s: float) -> None:
    for times in ((time_s, 0.0, 0.0), (1.0, time_s, 0.0), (1.0, 1.0, time_s)):
        forward_s, backward_s, update_s = times
        with pytest.raises(SpecError, match="of a stage on device 2 must be finite"):
            StageCost(2, forward_s, backward_s, update_s=update_s)
    with pytest.raises(SpecError, match="of a link from 0 to 1 must be finite"):
        StageLink("F", 0, 1, 8, time_s)
