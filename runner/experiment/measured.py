"""What was measured when a plan was carried out, beside its prediction."""

from dataclasses import dataclass

from runner.output.terminal import counted
from runner.output.units import GIB, format_size, time_unit

__all__ = ["Measured", "error_pct", "measured_lines", "measured_metrics"]


@dataclass(frozen=True, slots=True)
class Measured:
    """A plan that was run. Fields are of what `way` runs."""

    way: str
    """``local``: one input, or a training step on it, partitions one after another. ``pipeline``: a
    step of all microbatches, one process per stage."""
    time_s: float
    """Median of `runs_s`."""
    runs_s: tuple[float, ...]
    predicted_s: float
    """By the run's source of operator times, for the same way of running."""
    throughput_per_s: float
    """Inputs, or microbatches, per second."""
    unsplit_s: float | None
    """Median time of the unsplit model, timed in alternation; None for a pipeline."""
    peak_bytes: tuple[int, ...]
    """Live tensors, weights included, of each device or stage."""
    predicted_peak_bytes: tuple[int, ...]
    """Prediction of `peak_bytes`."""
    allocator_peak_bytes: tuple[int, ...]
    """The most that torch's allocator gave out on each CUDA device of a local run; of a pipeline on
    CUDA devices that is `peak_bytes`. Empty elsewhere."""
    max_difference: float
    """From the results (or the loss) of the unsplit model; 0.0 is bit for bit the same."""
    gradient_difference: float | None
    """Largest share by which a gradient differs; None where there are none."""
    tied_gradient_difference: float | None
    """The same of weights that several stages share, whose gradients are summed over the stages;
    None where there are none."""
    device_name: str
    threads: int

    @property
    def time_error_pct(self) -> float:
        """How far the prediction is above the measurement, in per cent of the measurement."""
        return error_pct(self.predicted_s, self.time_s)

    @property
    def peak_error_pct(self) -> float:
        """The same of the largest peak."""
        return error_pct(max(self.predicted_peak_bytes), max(self.peak_bytes))


def error_pct(predicted: float, measured: float) -> float:
    """Return how far `predicted` is above `measured`, in per cent of it; 0 where both are 0."""
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
    """Return a line with measurements and predictions, and one on the results."""
    a_step = measured.way == "pipeline" or measured.gradient_difference is not None
    work = "a step" if a_step else "an input"
    times = time_unit(max(measured.time_s, measured.predicted_s))
    least, most = min(measured.runs_s), max(measured.runs_s)
    timed = (
        f"measured:  {times.show(measured.time_s)} {times.name} {work}"
        f" ({counted(len(measured.runs_s), 'run')}, {times.show(least)} to {times.show(most)}),"
        f" predicted {times.show(measured.predicted_s)} ({measured.time_error_pct:+.1f}%);"
        f" peak {format_size(max(measured.peak_bytes))}, predicted"
        f" {format_size(max(measured.predicted_peak_bytes))} ({measured.peak_error_pct:+.1f}%)"
        f"{_allocated(measured)}"
    )
    return timed, f"results:   {_agreement(measured)}; {measured.device_name}"


def _allocated(measured: Measured) -> str:
    most = max(measured.allocator_peak_bytes, default=0)
    return f", {format_size(most)} by torch's allocator" if most else ""


def _agreement(measured: Measured) -> str:
    """Return how far the results are from the unsplit model's."""
    apart, gradients = measured.max_difference, measured.gradient_difference
    words = "equal to the unsplit model's" if apart == 0 else f"within {apart:.2g} of the unsplit's"
    if gradients is None:
        return words
    return f"{words}, gradients " + ("equal" if gradients == 0 else f"within {gradients:.2g}")
