"""What a configuration asks of a schedule, and what it comes to."""

import numpy as np
import pytest

from fxpart.errors import InfeasibleError, SpecError
from runner.pipeline_schedule import check_schedule, schedule_line, schedule_metrics, scheduled
from tests.runner.composed import read
from tests.runner.pipelines import HALVES, THERE_AND_BACK, forward, step_of_training, training_step


@pytest.mark.parametrize(
    ("overrides", "said"),
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
def test_what_makes_no_sense_is_refused(overrides: list[str], said: str) -> None:
    with pytest.raises(SpecError) as refused:
        check_schedule(read(*overrides))
    assert said in str(refused.value)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved"])
def test_every_schedule_is_taken(name: str) -> None:
    check_schedule(read(f"schedule={name}", "microbatches=4"))
    check_schedule(read(f"schedule={name}"))


def test_no_schedule_is_simulated_unasked() -> None:
    assert scheduled(read(), forward(), HALVES) is None


def test_metrics_of_a_step_by_hand() -> None:
    result = scheduled(read("schedule=gpipe", "microbatches=3"), forward(), HALVES)
    assert result is not None
    assert schedule_metrics(result) == {
        "step_ms": pytest.approx(9000),
        "bubble_pct": pytest.approx(100 / 3),
        "microbatches_per_s": pytest.approx(1 / 3),
        "schedule_peak_gib": 24 / 2**30,
    }
    assert result.peak_bytes == (22, 24)
    assert schedule_line(result) == (
        "gpipe: step 9000 ms for 3 microbatches, 0.333 microbatches/s, bubble 33.3%, peak 24 B"
    )


def test_a_training_step_by_hand() -> None:
    found = schedule_line(step_of_training())
    assert found.startswith("gpipe: training step 8000 ms for 2 microbatches, 0.25 microbatches/s")
    assert "bubble 50.0%" in found


def test_what_is_in_flight_must_fit() -> None:
    """The placement fits: device 1 holds 22 bytes for one microbatch, and 24 for three."""
    config = read("schedule=gpipe", "microbatches=3")
    assert scheduled(config, forward(22, 24), HALVES) is not None
    with pytest.raises(InfeasibleError) as refused:
        scheduled(config, forward(22, 23), HALVES)
    assert (refused.value.needed_bytes, refused.value.available_bytes) == (24, 23)
    said = str(refused.value)
    assert "schedule=gpipe with 3 microbatches holds 24 B (24 bytes) on device 1" in said
    assert "which has 23 B (23 bytes); take smaller microbatches, fewer of them, more" in said


@pytest.mark.parametrize(("name", "advised"), [("gpipe", True), ("1f1b", False)])
def test_training_that_does_not_fit_is_advised_another_order(name: str, advised: bool) -> None:
    config = read(f"schedule={name}", "microbatches=4")
    with pytest.raises(InfeasibleError) as refused:
        scheduled(config, training_step(1, 1), THERE_AND_BACK)
    assert ("schedule=1f1b, which keeps fewer activations," in str(refused.value)) is advised


def test_sums_over_replicas_come_once_before_the_updates() -> None:
    config = read("schedule=gpipe", "microbatches=2", "phase=training")
    alone = scheduled(config, training_step(), THERE_AND_BACK)
    summed = scheduled(config, training_step(), THERE_AND_BACK, np.array([0.0, 100.0]))
    first = scheduled(config, training_step(), THERE_AND_BACK, np.array([1.0, 0.0]))
    assert alone is not None
    assert summed is not None
    assert first is not None
    # The first device is the last to end its backward; the second waits a hundred seconds.
    assert first.step_s == alone.step_s + 1.0
    assert summed.step_s > alone.step_s
    assert summed.step_s < alone.step_s + 100.0
