"""Measurements beside predictions."""

from dataclasses import replace

import pytest

from runner.experiment.measurement import Measured, error_pct, measured_lines, measured_metrics

PIPELINE = Measured(
    way="pipeline",
    time_s=0.020,
    runs_s=(0.021, 0.019, 0.020),
    predicted_s=0.018,
    throughput_per_s=200.0,
    unsplit_s=None,
    peak_bytes=(2048, 4096),
    predicted_peak_bytes=(3072, 5120),
    allocator_peak_bytes=(),
    max_difference=0.0,
    gradient_difference=0.0,
    tied_gradient_difference=None,
    nan_elements=0,
    device_name="a CPU",
    threads=1,
)


@pytest.mark.parametrize(
    ("predicted", "measured", "expected"),
    [(18, 20, -10), (30, 20, 50), (20, 20, 0), (0, 0, 0), (0, 4, -100), (1, 0, float("inf"))],
)
def test_the_error_is_relative_to_the_measurement(
    predicted: float, measured: float, expected: float
) -> None:
    assert error_pct(predicted, measured) == pytest.approx(expected)


def test_metrics_by_hand() -> None:
    assert measured_metrics(PIPELINE) == {
        "measured_ms": pytest.approx(20),
        "predicted_ms": pytest.approx(18),
        "time_error_pct": pytest.approx(-10),
        "measured_throughput_per_s": 200.0,
        "measured_peak_gib": 4096 / 2**30,
        "predicted_peak_gib": 5120 / 2**30,
        "peak_error_pct": pytest.approx(25),
        "max_difference": 0.0,
        "gradient_difference": 0.0,
    }
    local = measured_metrics(
        replace(
            PIPELINE,
            unsplit_s=0.01,
            gradient_difference=None,
            allocator_peak_bytes=(2**29, 2**28),
        )
    )
    assert local["allocator_peak_gib"] == 0.5
    assert local["unsplit_ms"] == pytest.approx(10)
    assert "gradient_difference" not in local


def test_lines_of_a_pipeline() -> None:
    assert measured_lines(PIPELINE) == (
        "measured:  20.00 ms a step (3 runs, 19.00 to 21.00), predicted 18.00 (-10.0%);"
        " peak 4.00 KiB, predicted 5.00 KiB for the graph (+25.0%)",
        "results:   equal to the unsplit model's, gradients equal; a CPU",
    )


def test_lines_of_a_local_run_that_is_not_equal() -> None:
    times, results = measured_lines(
        replace(
            PIPELINE,
            way="local",
            time_s=2e-5,
            runs_s=(2e-5,),
            predicted_s=3e-5,
            max_difference=1.234e-6,
            gradient_difference=None,
        )
    )
    assert times.startswith(
        "measured:  20.00 us an input (1 run, 20.00 to 20.00), predicted 30.00 (+50.0%);"
    )
    assert results == "results:   within 1.2e-06 of the unsplit's; a CPU"
    on_gpu = measured_lines(replace(PIPELINE, allocator_peak_bytes=(8192, 1024)))[0]
    assert on_gpu.endswith(
        "predicted 5.00 KiB for the graph (+25.0%), 8.00 KiB by torch's allocator"
    )
    differing = replace(PIPELINE, gradient_difference=2e-7)
    assert "gradients within 2e-07;" in measured_lines(differing)[1]


def test_nan_in_the_results_are_counted() -> None:
    results = measured_lines(replace(PIPELINE, nan_elements=7))[1]
    assert results == (
        "results:   equal to the unsplit model's, gradients equal, but 7 elements are NaN in both:"
        " what they should be is not compared; a CPU"
    )
