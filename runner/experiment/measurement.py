"""Measurements of an executed plan, next to their predictions."""

from dataclasses import dataclass

from runner.output.terminal import counted
from runner.output.units import GIB, format_size, time_unit

__all__ = ["Measured", "error_pct", "measured_lines", "measured_metrics"]


@dataclass(frozen=True, slots=True)
class Measured:
    """The measurements of one run of a plan."""

    way: str
    """``local``: one input, or a training step on it, partitions one after another. ``pipeline``: a
    step of all microbatches, one process per stage."""
    time_s: float
    """Median of `runs_s`."""
    runs_s: tuple[float, ...]
    predicted_s: float
    """Predicted from the run's source of operator times, for the same way of running."""
    throughput_per_s: float
    """Inputs, or microbatches, per second."""
    unsplit_s: float | None
    """Median time of the unsplit model, timed in alternation; None for a pipeline."""
    peak_bytes: tuple[int, ...]
    """Peak bytes of live tensors, weights included, of each device or stage."""
    predicted_peak_bytes: tuple[int, ...]
    """Prediction of `peak_bytes`."""
    allocator_peak_bytes: tuple[int, ...]
    """Peak bytes allocated by torch on each CUDA device of a local run. Empty otherwise; in a
    pipeline on CUDA devices these are `peak_bytes`."""
    max_difference: float
    """Largest difference from the unsplit model's results, or its loss; 0.0 if bitwise equal."""
    gradient_difference: float | None
    """Largest relative difference of a gradient; None without gradients."""
    tied_gradient_difference: float | None
    """The same for weights shared by several stages, whose gradients are summed over the stages;
    None without such weights."""
    nan_elements: int
    """Number of NaN in results and gradients: NaN equals NaN, so equality says little there."""
    device_name: str
    threads: int

    @property
    def time_error_pct(self) -> float:
        """Error of the predicted time, in per cent of the measurement; positive if too high."""
        return error_pct(self.predicted_s, self.time_s)

    @property
    def peak_error_pct(self) -> float:
        """Error of the largest predicted peak, in per cent of the measurement."""
        return error_pct(max(self.predicted_peak_bytes), max(self.peak_bytes))


def error_pct(predicted: float, measured: float) -> float:
    """Return the error of `predicted` in per cent of `measured`; 0 if both are 0."""
    if measured == 0:
        return 0.0 if predicted == 0 else float("inf")
    return (predicted / measured - 1) * 100


def measured_metrics(measured: Measured) -> dict[str, float]:
    """Return the metrics of a run by name."""
    metrics = {
        "measured_ms": measured.time_s * 1e3,
        "predicted_ms": measured.predicted_s * 1e3,
        "time_error_pct": measured.time_error_pct,
        "measured_throughput_per_s": measured.throughput_per_s,
        "measured_peak_gib": max(measured.peak_bytes) / GIB,
        "predicted_peak_gib": max(measured.predicted_peak_bytes) / GIB,
        "peak_error_pct": measured.peak_error_pct,
        "max_difference": measured.max_difference,
    }
    if measured.allocator_peak_bytes:
        metrics["allocator_peak_gib"] = max(measured.allocator_peak_bytes) / GIB
    if measured.unsplit_s is not None:
        metrics["unsplit_ms"] = measured.unsplit_s * 1e3
    if measured.gradient_difference is not None:
        metrics["gradient_difference"] = measured.gradient_difference
    return metrics


def measured_lines(measured: Measured) -> tuple[str, str]:
    """Return a line of measurements and predictions, and one on the agreement of results."""
    a_step = measured.way == "pipeline" or measured.gradient_difference is not None
    work = "a step" if a_step else "an input"
    times = time_unit(max(measured.time_s, measured.predicted_s))
    low_s, high_s = min(measured.runs_s), max(measured.runs_s)
    timed = (
        f"measured:  {times.show(measured.time_s)} {times.name} {work}"
        f" ({counted(len(measured.runs_s), 'run')}, {times.show(low_s)} to {times.show(high_s)}),"
        f" predicted {times.show(measured.predicted_s)} ({measured.time_error_pct:+.1f}%);"
        f" peak {format_size(max(measured.peak_bytes))}, predicted"
        f" {format_size(max(measured.predicted_peak_bytes))} for the graph"
        f" ({measured.peak_error_pct:+.1f}%)"
        f"{_allocated(measured)}"
    )
    return timed, f"results:   {_agreement(measured)}; {measured.device_name}"


def _allocated(measured: Measured) -> str:
    peak_bytes = max(measured.allocator_peak_bytes, default=0)
    return f", {format_size(peak_bytes)} by torch's allocator" if peak_bytes else ""


def _agreement(measured: Measured) -> str:
    """Return the difference from the unsplit model's results, as text."""
    difference, gradients = measured.max_difference, measured.gradient_difference
    text = (
        "equal to the unsplit model's"
        if difference == 0
        else f"within {difference:.2g} of the unsplit's"
    )
    if gradients is not None:
        text += ", gradients " + ("equal" if gradients == 0 else f"within {gradients:.2g}")
    if measured.nan_elements:
        text += (
            f", but {measured.nan_elements} elements are NaN in both: what they should be is not"
            " compared"
        )
    return text
