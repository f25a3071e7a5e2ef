"""The schedule that a configuration requests, and its results."""

from dataclasses import replace

import numpy as np
import pytest

from fxpart.cost.all_reduce import AllReduce
from fxpart.errors import InfeasibleError, SpecError
from fxpart.schedule import ReplicaSum
from runner.experiment.pipeline_schedule import (
    check_schedule,
    schedule_line,
    schedule_metrics,
    scheduled,
)
from tests.runner.composed import read
from tests.runner.pipelines import HALVES, THERE_AND_BACK, forward, step_of_training, training_step


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["schedule.name=gpip"], "schedule=gpip does not exist; nearest: gpipe"),
        (["microbatches=0", "schedule=gpipe"], "microbatches=0 must be 1 or more"),
        (["microbatches=-1"], "microbatches=-1 must be 1 or more"),
        (["microbatches=4"], "microbatches=4 needs a schedule; add schedule=gpipe, 1f1b or"),
        (
            ["schedule=1f1b", "devices.saturate_host=true"],
            "schedule=1f1b runs one pipeline, and devices.saturate_host=true copies it",
        ),
    ],
)
def test_meaningless_schedules_are_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(SpecError) as refused:
        check_schedule(read(*overrides))
    assert message in str(refused.value)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved"])
def test_every_schedule_is_accepted(name: str) -> None:
    check_schedule(read(f"schedule={name}", "microbatches=4"))
    check_schedule(read(f"schedule={name}"))


def test_no_schedule_is_simulated_by_default() -> None:
    assert scheduled(read(), forward(), HALVES) is None


def test_metrics_of_a_step_by_hand() -> None:
    result = scheduled(read("schedule=gpipe", "microbatches=3"), forward(), HALVES)
    assert result is not None
    assert schedule_metrics(result) == {
        "step_ms": pytest.approx(9000),
        "bubble_pct": pytest.approx(100 / 3),
        "schedule_peak_gib": 24 / 2**30,
    }
    assert result.peak_bytes == (22, 24)
    assert schedule_line(result, "0.333 examples/s") == (
        "gpipe: step 9000 ms for 3 microbatches, 0.333 examples/s, bubble 33.3%, peak 24 B"
    )


def test_a_training_step_by_hand() -> None:
    line = schedule_line(step_of_training(), "0.25 examples/s")
    assert line.startswith("gpipe: training step 8000 ms for 2 microbatches, 0.25 examples/s")
    assert "bubble 50.0%" in line


def test_microbatches_in_flight_must_fit() -> None:
    """The placement fits: device 1 holds 22 bytes for one microbatch, and 24 for three."""
    config = read("schedule=gpipe", "microbatches=3")
    assert scheduled(config, forward(22, 24), HALVES) is not None
    with pytest.raises(InfeasibleError) as refused:
        scheduled(config, forward(22, 23), HALVES)
    assert (refused.value.needed_bytes, refused.value.available_bytes) == (24, 23)
    message = str(refused.value)
    assert "schedule=gpipe with 3 microbatches holds 24 B (24 bytes) on device 1" in message
    assert "weights and what is kept for them 20 B, inputs and results" in message
    assert message.endswith("it has 23 B (23 bytes)")


@pytest.mark.parametrize(("name", "in_flight"), [("gpipe", 4), ("1f1b", 2)])
def test_a_step_that_does_not_fit_names_its_activations_in_flight(
    name: str, in_flight: int
) -> None:
    config = read(f"schedule={name}", "microbatches=4")
    with pytest.raises(InfeasibleError) as refused:
        scheduled(config, training_step(1, 1), THERE_AND_BACK)
    assert f"activations of {in_flight} microbatches in flight {in_flight} B" in str(refused.value)


def _sums(*after_s: float, within_s: float = 0.0) -> AllReduce:
    """Return sums that keep each ring busy that long; each is `within_s` longer in the model."""
    none, within = np.zeros(len(after_s), dtype=np.int64), np.full(len(after_s), within_s)
    return AllReduce(none, none, np.array(after_s) + within, within, within, 0.0, 1.0)


def test_sums_over_replicas_come_once_before_the_updates() -> None:
    config = read("schedule=gpipe", "microbatches=2", "phase=training")
    alone = scheduled(config, training_step(), THERE_AND_BACK)
    summed = scheduled(config, training_step(), THERE_AND_BACK, _sums(0.0, 100.0))
    first = scheduled(config, training_step(), THERE_AND_BACK, _sums(1.0, 0.0))
    assert alone is not None
    assert summed is not None
    assert first is not None
    # The first device ends its last backward at 8, the second at 6.
    assert (alone.step_s, first.step_s, summed.step_s) == (8.0, 9.0, 106.0)
    assert summed.sums == (ReplicaSum(1, 6.0, 106.0),)
    # A device that waits for sums does not compute.
    assert alone.busy_s == first.busy_s == summed.busy_s
    assert summed.bubble_fraction == pytest.approx(1 - 8 / (2 * 106))


def test_sums_in_inference_are_no_updates() -> None:
    config = read("schedule=gpipe", "microbatches=3")
    result = scheduled(config, forward(), HALVES, _sums(0.0, 2.0, within_s=0.5))
    assert result is not None
    # Half a second more for each microbatch, on either device, and the last after the first.
    assert result.step_s == 9 + 4 * 0.5 + 2.0
    assert result.updates == ()
    assert result.sums == (ReplicaSum(1, 11.0, 13.0),)
    assert result.busy_s == (6.0, 6.0)


def test_reserves_are_reported() -> None:
    this = forward(22, 23)
    left = tuple(replace(device, reserved_bytes=50) for device in this.topology.devices)
    reserved = replace(this, topology=replace(this.topology, devices=left))
    with pytest.raises(InfeasibleError, match=r"has 23 B \(23 bytes\) beside 50 B reserved"):
        scheduled(read("schedule=gpipe", "microbatches=3"), reserved, HALVES)
