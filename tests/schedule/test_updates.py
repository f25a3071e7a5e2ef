"""All-reduces over replicas and updates of weights at the end of a simulated step, by hand."""

from dataclasses import replace

import pytest

from fxpart.errors import SpecError
from fxpart.schedule import (
    PipelineCosts,
    ReplicaSum,
    StageCost,
    StageUpdate,
    simulate_schedule,
)


def test_updates_follow_the_last_backward_of_their_device() -> None:
    # Devices 5 and 6 have two stages each; stage 1 has nothing to update.
    stages = [
        StageCost(device, 1.0, 1.0, update_s=taken_s)
        for device, taken_s in zip((5, 6, 5, 6), (2.0, 0.0, 3.0, 1.0), strict=True)
    ]
    plain_stages = [replace(stage, update_s=0.0) for stage in stages]
    result = simulate_schedule("interleaved", PipelineCosts(tuple(stages), (), training=True), 2)
    plain = simulate_schedule(
        "interleaved", PipelineCosts(tuple(plain_stages), (), training=True), 2
    )
    assert result.events == plain.events
    last_s = [max(e.finish_s for e in result.events if e.device == device) for device in (5, 6)]
    assert result.updates == (
        StageUpdate(5, 0, last_s[0], last_s[0] + 2),
        StageUpdate(5, 2, last_s[0] + 2, last_s[0] + 5),
        StageUpdate(6, 3, last_s[1], last_s[1] + 1),
    )
    assert result.step_s == max(last_s[0] + 5, last_s[1] + 1)
    assert result.busy_s == (plain.busy_s[0] + 5, plain.busy_s[1] + 1)
    assert plain.updates == ()


def test_memory_of_updates_by_hand() -> None:
    # Two stages on one device, each with 100 of weights, 10 of gradients and 1 of results per
    # micro-batch, of which there are 2; updates allocate 30, of which 20 stay.
    cost = StageCost(
        0,
        1.0,
        1.0,
        weight_bytes=100,
        gradient_bytes=10,
        output_bytes=1,
        first_backward_peak_bytes=10,
        update_peak_bytes=30,
        update_kept_bytes=20,
    )
    result = simulate_schedule("interleaved", PipelineCosts((cost, cost), (), training=True), 2)
    assert result.peak_bytes == (2 * 100 + 2 * 2 * 1 + 2 * 10 + 20 + 30,)
    # A backward that needs more than the updates is the peak.
    busy = replace(cost, backward_peak_bytes=500)
    assert simulate_schedule("gpipe", PipelineCosts((busy,), (), training=True), 2).peak_bytes == (
        100 + 2 + 10 + 500,
    )


def test_all_reduces_run_once_before_the_updates_and_do_not_compute() -> None:
    stages = (
        StageCost(3, 1.0, 2.0, update_s=0.5, reduce_s=4.0),
        StageCost(4, 1.0, 2.0, update_s=0.5),
    )
    result = simulate_schedule("gpipe", PipelineCosts(stages, (), training=True), 2)
    last_s = max(event.finish_s for event in result.events if event.device == 3)
    assert result.sums == (ReplicaSum(3, last_s, last_s + 4),)
    done_s = max(event.finish_s for event in result.events if event.device == 4)
    assert result.updates == (
        StageUpdate(3, 0, last_s + 4, last_s + 4.5),
        StageUpdate(4, 1, done_s, done_s + 0.5),
    )
    assert result.step_s == last_s + 4.5
    assert result.busy_s == (2 * 3 + 0.5, 2 * 3 + 0.5)
    assert result.bubble_fraction == pytest.approx(1 - 13 / (2 * result.step_s))


def test_all_reduces_end_a_step_without_updates() -> None:
    stages = (StageCost(0, 1.0, reduce_s=4.0),)
    result = simulate_schedule("gpipe", PipelineCosts(stages, (), training=False), 3)
    assert (result.step_s, result.busy_s, result.updates) == (7.0, (3.0,), ())


def test_all_reduces_inside_the_model_run_with_each_microbatch() -> None:
    stages = (StageCost(0, 1.0, 2.0, within_s=0.5),)
    result = simulate_schedule("gpipe", PipelineCosts(stages, (), training=True), 3)
    assert result.step_s == 3 * 3.5
    assert result.busy_s == (9.0,)
    assert result.sums == ()


@pytest.mark.parametrize("name", ["within_s", "reduce_s", "update_s"])
def test_invalid_times_are_refused(name: str) -> None:
    with pytest.raises(SpecError, match=f"{name} of a stage on device 0 must be finite and at"):
        StageCost(0, 1.0, **{name: -1.0})  # type: ignore[arg-type]
