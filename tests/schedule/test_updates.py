"""Updates of weights at the end of a simulated step, by hand."""

from dataclasses import replace

from fxpart.schedule import PipelineCosts, StageCost, StageUpdate, simulate_schedule


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
    # Two stages of one device, each with 100 of weights, 10 of gradients and 1 of results a
    # micro-batch, of which there are 2; updates make 30, of which 20 stay.
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
    # A backward that needs more than what updates make is the peak.
    busy = replace(cost, backward_peak_bytes=500)
    assert simulate_schedule("gpipe", PipelineCosts((busy,), (), training=True), 2).peak_bytes == (
        100 + 2 + 10 + 500,
    )
