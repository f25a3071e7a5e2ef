"""What a run is compared by: its measures, their names, units and digits."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from runner.report.rows import SweepRow

__all__ = ["Measure", "finished", "measures_of", "number"]


@dataclass(frozen=True, slots=True)
class Measure:
    """A number of a run, as it is shown."""

    key: str
    """Of the metric."""
    name: str
    unit: str
    """Empty for a count."""
    form: str
    """Format of the number in that unit."""
    scale: float = 1.0
    """From the metric's unit to that unit."""

    def value(self, row: SweepRow) -> float | None:
        """Return the number of `row` in this unit, or None."""
        found = number(row, self.key)
        return None if found is None else found * self.scale

    def text(self, row: SweepRow) -> str:
        """Return the number of `row` as it is shown, ``-`` for none."""
        found = self.value(row)
        return "-" if found is None else format(found, self.form)

    @property
    def label(self) -> str:
        """Name and unit, such as ``latency, ms``."""
        return f"{self.name}, {self.unit}" if self.unit else self.name


_LATENCY = Measure("latency_ms", "latency", "ms", ",.3f")
_GAP = Measure("optimality_gap_pct", "gap", "%", ".1f")
_PEAK = Measure("peak_memory_gib", "peak", "GiB", ".3f")
_SERVED = Measure("throughput_per_s", "inputs", "per s", ",.2f")
_EXAMPLE = Measure("example_ms", "time per example", "ms", ",.3f")
_MICROBATCH = Measure("microbatch_ms", "time per microbatch", "ms", ",.3f")
_STEP = Measure("step_ms", "step", "ms", ",.3f")
_BUBBLE = Measure("bubble_pct", "bubble", "%", ".1f")
_SCHEDULE_PEAK = Measure("schedule_peak_gib", "peak", "GiB", ".3f")
_USED = Measure("devices_used", "devices used", "", ".0f")
_PARTS = Measure("partitions", "parts", "", ".0f")
_MEASURED = Measure("measured_ms", "measured", "ms", ",.3f")
_ERROR = Measure("time_error_pct", "error", "%", "+.1f")

_SMALLER = {
    "ms": (("us", 1e3), ("ns", 1e6)),
    "GiB": (("MiB", 2.0**10), ("KiB", 2.0**20)),
}
"""Units below, and how many of them one is."""
_LEAST = 0.1
"""A column whose largest number is less shows too few digits: it gets a smaller unit."""


def number(row: SweepRow, key: str) -> float | None:
    """Return the metric `key` of `row`, or what it follows from; None when it has none."""
    derived = _DERIVED.get(key)
    return derived(row.metrics) if derived else row.metrics.get(key)


def _example_ms(metrics: Mapping[str, float]) -> float | None:
    """Return the time by example of a stream of inputs, the inverse of its throughput."""
    rate = metrics.get("examples_per_s")
    return 1e3 / rate if rate else None


def _microbatch_ms(metrics: Mapping[str, float]) -> float | None:
    """Return the time of a step by microbatch, None without a schedule."""
    if metrics.get("step_ms") is None:
        return None
    # What takes no time has no finite rate, and an infinite one is not kept.
    rate = metrics.get("microbatches_per_s")
    return 1e3 / rate if rate else 0.0


_DERIVED: dict[str, Callable[[Mapping[str, float]], float | None]] = {
    "example_ms": _example_ms,
    "microbatch_ms": _microbatch_ms,
}


def finished(row: SweepRow) -> bool:
    """Return whether `row` has a result to compare."""
    return row.status == "finished" and row.metrics.get("latency_ms") is not None


def measures_of(rows: Sequence[SweepRow]) -> tuple[Measure, ...]:
    """Return what to show of `rows`; the first is what they are ranked by, the least the best.

    Where batch sizes differ, that is the time per example. Where all results have a schedule, it is
    the time per microbatch, since their steps may have different numbers of them. Where one has
    replicas, which serve more inputs at the same latency, all show their inputs per second; where
    one was measured, all show that.
    """
    done = [row for row in rows if finished(row)]
    if done and all(number(row, "microbatch_ms") is not None for row in done):
        shown = [_MICROBATCH, _SCHEDULE_PEAK, _STEP, _BUBBLE]
    else:
        served = any((number(row, "replicas") or 0) > 1 for row in done)
        shown = [_LATENCY, _GAP, _PEAK, *([_SERVED] if served else [])]
    sizes = {row.settings.get("model.batch_size") for row in done}
    if len(sizes) > 1 and all(number(row, "example_ms") is not None for row in done):
        shown = [_EXAMPLE, *(measure for measure in shown if measure is not _MICROBATCH)]
    if len({number(row, "devices_used") for row in done}) > 1:
        shown.append(_USED)
    shown.append(_PARTS)
    if any(number(row, "measured_ms") is not None for row in done):
        shown += [_MEASURED, _ERROR]
    return tuple(_legible(measure, done) for measure in shown)


def _legible(measure: Measure, rows: Sequence[SweepRow]) -> Measure:
    """Return `measure` in a unit in which its numbers have digits."""
    found = [value for row in rows if (value := number(row, measure.key)) is not None]
    most, fit = max(found, default=0.0), measure
    for unit, scale in _SMALLER.get(measure.unit, ()):
        if 0 < most * fit.scale < _LEAST:
            fit = replace(measure, unit=unit, scale=scale)
    return fit
