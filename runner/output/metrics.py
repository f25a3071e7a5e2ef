"""The metrics of a run: name, unit, digits, meaning, and where each is shown.

`METRICS` and `DEVICE_METRICS` define the tables in the terminal, MLflow's comparison page, reports
and their ranking, the check of ``hydra.sweeper.metric``, and docs/metrics.md, which ``python -m
runner.output.metrics`` prints. A new metric is a row here, and a value of the same name in
`runner.experiment`.
"""

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

from runner.output.units import GIB

if TYPE_CHECKING:
    from fxpart.cost.evaluation import DeviceUse

__all__ = [
    "BY_NAME",
    "BY_OBJECTIVE",
    "DERIVED",
    "DEVICE_METRICS",
    "LAST_SPARE",
    "METRICS",
    "OF_PLANS",
    "SERIES",
    "DeviceMetric",
    "Metric",
    "PageColumn",
    "metrics_page",
    "page_columns",
]

Column = Literal[
    "", "always", "plain", "bounded", "mixed", "scheduled", "differs", "some", "trained", "tokens"
]
"""When a report has a column for a metric: never, always, if no job has a schedule, if moreover a
job has the metric, if not all jobs have a schedule, if all have one, if jobs differ in the metric,
if a job has it, if a job trains, if it is not a fixed multiple of the throughput."""


LAST_SPARE = 8


class PageColumn(NamedTuple):
    """A column of MLflow's comparison page."""

    place: int
    """Position: columns are in this order, and from 20 on after the most common parameters."""
    width: int
    """Width in pixels."""


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric of a run."""

    name: str
    """Its name in MLflow, ``result.json`` and ``hydra.sweeper.metric``."""
    unit: str
    """Empty for a count."""
    format: str
    """Format specification of Python."""
    better: Literal["lower", "higher"] | None
    sentence: str
    jobs: str = ""
    """The feature that a job needs to log it; empty if every placement has it."""
    heading: str = ""
    """Its name in reports; empty if they do not show it."""
    per: str = ""
    """The unit of work of a time, if not one input."""
    column: Column = ""
    spare: int = 0
    """Narrow terminals drop columns in this order, equal ones together. 0 always stays, and those
    of `LAST_SPARE` are dropped only after long settings are broken into lines."""
    page: PageColumn | None = None


_LOWER: Literal["lower"] = "lower"
_HIGHER: Literal["higher"] = "higher"
_TRAINING, _REPLICAS, _SYMBOLIC = "phase=training", "data_parallel", "capture.symbolic"
_SPLIT, _COLLECTIVES = "tensor_parallel", "degrees or zero"
_TIERS = "a tier, such as `+host64gb`"
_PRICE, _PRICED_TOKENS = "price_per_hour", "price_per_hour, model.seq_len"
_SERVING, _GENERATE = "phase=prefill, decode or generate", "phase=generate"
_THROUGHPUT = "objective=throughput"
_MEMORY, _ENERGY = "objective=memory", "objective=energy"
_SCHEDULE, _RUN, _SEARCH = "schedule", "execute", "a search of operators"
OF_PLANS = (_REPLICAS, _SPLIT, _COLLECTIVES, _SCHEDULE)
"""Features of `Metric.jobs` that some plans of a model have and others do not."""
_ONE_INPUT = "neither `schedule` nor replicas"

# fmt: off
METRICS = (
    Metric("latency_ms", "ms", ",.3f", _LOWER, "Simulated time of one input through the model.",
           heading="latency", column="plain", page=PageColumn(1, 90)),
    Metric("optimality_gap_pct", "%", ".1f", _LOWER,
           "Latency relative to the lower bound, minus 1.", _ONE_INPUT,
           heading="gap", column="bounded", spare=2, page=PageColumn(28, 140)),
    Metric("peak_memory_gib", "GiB", ".3f", _LOWER,
           "Largest peak of any device: weights, inputs and live tensors.",
           heading="peak", column="mixed", page=PageColumn(2, 125)),
    Metric("device_memory_gib", "GiB", ".3f", _LOWER,
           "Expected memory of the device that needs most, as shown by nvidia-smi: with the"
           " context, the allocator and workspaces.",
           page=PageColumn(24, 130)),
    Metric("device_memory_gib_low", "GiB", ".3f", None, "Lower limit of `device_memory_gib`."),
    Metric("device_memory_gib_high", "GiB", ".3f", None,
           "Upper limit of `device_memory_gib`; the plan is tight if a device has less."),
    Metric("memory_is_tight", "", ".0f", _LOWER,
           "1 if a device has the expected memory but less than the upper limit."),
    Metric("examples_per_s", "examples/s", ",.2f", _HIGHER,
           "Throughput: of a stream of inputs, of consecutive training steps or decodes, or of a"
           " schedule; in a generation, texts of consecutive generations.",
           heading="throughput", column="some", spare=5, page=PageColumn(4, 115)),
    Metric("mfu_pct", "%", ".1f", _HIGHER,
           "Model FLOPs utilization: FLOPs of the forward, plus twice as many for a backward (as"
           " many for frozen weights), relative to the peak of all devices in that time.",
           heading="MFU", column="trained", spare=1, page=PageColumn(29, 85)),
    Metric("schedule_peak_gib", "GiB", ".3f", _LOWER,
           "Largest peak of any device in a step of the schedule.",
           _SCHEDULE, heading="peak", column="scheduled"),
    Metric("step_ms", "ms", ",.3f", _LOWER,
           "Simulated time of a step: all microbatches, all-reduces over replicas, updates.",
           _SCHEDULE, heading="step", column="scheduled", spare=1, page=PageColumn(8, 90)),
    Metric("bubble_pct", "%", ".1f", _LOWER,
           "Share of a step that devices spend waiting.",
           _SCHEDULE, heading="bubble", column="scheduled", spare=3, page=PageColumn(9, 100)),
    Metric("load_ms", "ms", ",.3f", _LOWER,
           "Largest load of any device or link for one input of a stream.", _THROUGHPUT,
           heading="load", column="some", spare=8),
    Metric("memory_bound_gib", "GiB", ".3f", None,
           "Lower bound of the fullest device's peak, for any placement of whole operators on"
           " these devices.",
           _MEMORY),
    Metric("memory_gap_pct", "%", ".1f", _LOWER,
           "Peak of the fullest device relative to that bound, minus 1.", _MEMORY,
           heading="gap", spare=6),
    Metric("energy_j", "J", ",.3f", _LOWER,
           "Energy of one input: the boards' rated power while they compute, 15 % of it while those"
           " in use wait.", _ENERGY, heading="energy", column="some", spare=8),
    Metric("energy_bound_j", "J", ",.3f", None,
           "Lower bound of the energy of any placement of whole operators on these devices.",
           _ENERGY),
    Metric("energy_gap_pct", "%", ".1f", _LOWER,
           "Energy relative to that bound, minus 1.", _ENERGY, heading="gap", spare=6),
    Metric("load_bound_ms", "ms", ",.3f", None,
           "Lower bound of the largest load of any placement of whole operators on these devices.",
           _THROUGHPUT),
    Metric("load_gap_pct", "%", ".1f", _LOWER,
           "Largest load relative to that bound, minus 1.", _THROUGHPUT,
           heading="gap", spare=6),
    Metric("devices_used", "", ".0f", _LOWER, "Devices that compute anything, in all replicas.",
           heading="devices used", column="differs", spare=7, page=PageColumn(22, 105)),
    Metric("partitions", "", ".0f", None,
           "Partitions: groups of operators on one device that never wait for a result to come"
           " back from another.",
           heading="parts", column="always", spare=4, page=PageColumn(3, 85)),
    Metric("replicas", "", ".0f", None,
           "Number of copies of the most replicated partition, which take inputs in turn."),
    Metric("feasible", "", ".0f", _HIGHER,
           "1 if a plan fits; 0, with no other metric, if none does.",
           page=PageColumn(21, 75)),
    Metric("static_memory_gib", "GiB", ".3f", _LOWER,
           "Largest memory of any device if nothing were ever freed."),
    Metric("transfer_gib", "GiB", ".3f", _LOWER, "Bytes sent between devices for one input.",
           page=PageColumn(23, 95)),
    Metric("lower_bound_ms", "ms", ",.3f", None,
           "Lower bound of the latency of any placement of whole operators on these devices."),
    Metric("critical_path_ms", "ms", ",.3f", _LOWER,
           "Longest path including transfers, as if a device ran any number of operators at once."),
    Metric("whole_modules_ms", "ms", ",.3f", _LOWER,
           "Latency of the best plan found that keeps modules whole.", _SEARCH),
    Metric("whole_modules_pct", "%", "+.1f", _LOWER,
           "That latency relative to the plan's, minus 1.", _SEARCH),
    Metric("operators", "", ".0f", None, "Operators of the captured graph."),
    Metric("weights_gib", "GiB", ".3f", None, "All weights of the model, each counted once."),
    Metric("capture_s", "s", ".2f", None, "Wall time of the capture, or of reading it from disk."),
    Metric("partition_s", "s", ".2f", _LOWER, "Wall time of the mode."),
    Metric("gradients_gib", "GiB", ".3f", _LOWER,
           "Gradients at the peak of the fullest device.", _TRAINING),
    Metric("optimizer_state_gib", "GiB", ".3f", _LOWER,
           "Optimizer state at the peak of the fullest device.", _TRAINING),
    Metric("saved_activations_gib", "GiB", ".3f", _LOWER,
           "Activations saved for the backward, at the peak of the fullest device.", _TRAINING),
    Metric("kv_cache_gib", "GiB", ".3f", _LOWER,
           "State kept between tokens (KV cache), total of all devices and tiers.",
           _SERVING, heading="cache", column="some", spare=6, page=PageColumn(25, 105)),
    Metric("ttft_ms", "ms", ",.3f", _LOWER,
           "Time to first token: the pass over a prompt, which fills the cache.",
           "phase=prefill or generate", heading="first token", column="some", spare=4,
           page=PageColumn(6, 80)),
    Metric("tpot_ms", "ms", ",.3f", _LOWER,
           "Time per output token: one decode step of all texts; in a generation the mean.",
           "phase=decode or generate", heading="per token", column="some", spare=4,
           page=PageColumn(7, 80)),
    Metric("tokens_per_s", "per s", ",.2f", _HIGHER,
           "Tokens of all texts of the batch per second: `model.seq_len` of each, or one a step"
           " of a decode; those of a generation over its whole time.",
           "model.seq_len", heading="tokens", column="tokens", spare=8, page=PageColumn(5, 105)),
    Metric("max_batch", "", ".0f", _HIGHER,
           "Largest batch of texts of prompt_len + output_len tokens that fits the plan.",
           _GENERATE, heading="max batch", column="some", spare=6, page=PageColumn(26, 95)),
    Metric("max_context", "", ",.0f", _HIGHER,
           "Longest context of each text of the batch that fits the plan, with the same prompts.",
           _GENERATE, heading="max context", column="some", spare=7, page=PageColumn(27, 105)),
    Metric("max_batch_in_tiers", "", ".0f", _HIGHER,
           "`max_batch` with everything possible in tiers.", "phase=generate with a tier"),
    Metric("max_context_in_tiers", "", ",.0f", _HIGHER,
           "`max_context` with everything possible in tiers.", "phase=generate with a tier"),
    Metric("price_per_hour", "USD", ",.2f", _LOWER,
           "Price of all devices, idle ones included.", _PRICE),
    Metric("price_per_million_examples", "USD", ",.4g", _LOWER,
           "That price over `examples_per_s`; none for a decode, which makes tokens.",
           _PRICE),
    Metric("price_per_million_tokens", "USD", ",.4g", _LOWER,
           "That price over `tokens_per_s`.", _PRICED_TOKENS,
           heading="per 1M tokens", column="some", spare=5),
    Metric("streamed_gib", "GiB", ".3f", _LOWER,
           "Bytes copied from a tier to devices for one input.", _TIERS,
           heading="streamed", column="some", spare=6),
    Metric("hosted_gib", "GiB", ".3f", None, "Host memory of modules that run on the host.",
           _TIERS),
    Metric("host_memory_gib", "GiB", ".3f", _LOWER,
           "Total host memory: hosted modules, streamed tensors, and buffers for copies.",
           _TIERS),
    Metric("disk_gib", "GiB", ".3f", _LOWER, "Bytes streamed from the disk.", _TIERS),
    Metric("pushed_gib", "GiB", ".3f", _LOWER,
           "Bytes written by devices to a tier for one input: caches, gradients.", _TIERS),
    Metric("tier_cache_gib", "GiB", ".3f", None, "Caches stored in a tier.", _TIERS),
    Metric("copy_wait_ms", "ms", ",.3f", _LOWER,
           "Latency added by copies.", _TIERS),
    Metric("data_parallel", "", ".0f", None, "Replicas that share the batch.", _REPLICAS),
    Metric("all_reduce_gib", "GiB", ".3f", _LOWER,
           "Most bytes that any device all-reduces over the replicas.", _REPLICAS),
    Metric("all_reduce_ms", "ms", ",.3f", _LOWER,
           "Most time that any device takes for these all-reduces.", _REPLICAS),
    Metric("exposed_all_reduce_ms", "ms", ",.3f", _LOWER,
           "Most of that time that any device waits.", _REPLICAS),
    Metric("tensor_parallel", "", ".0f", None, "Devices that share every operator.", _SPLIT),
    Metric("collectives", "", ".0f", _LOWER,
           "Number of collectives of the busiest group, for one input or all microbatches of a"
           " step, including ZeRO's.",
           _COLLECTIVES),
    Metric("collective_gib", "GiB", ".3f", _LOWER,
           "Bytes that these collectives reduce, gather or scatter.", _COLLECTIVES),
    Metric("collective_ms", "ms", ",.3f", _LOWER,
           "Most time that any device takes for collectives.", _COLLECTIVES),
    Metric("exposed_collective_ms", "ms", ",.3f", _LOWER,
           "Most of that time in which a device computes nothing.", _COLLECTIVES),
    Metric("max_batch_size", "", ".0f", _HIGHER,
           "Largest batch, over all replicas, whose tensors fit the plan.", _SYMBOLIC),
    Metric("smallest_device_memory_gib", "GiB", ".3f", _LOWER,
           "Memory that the fullest device needs for tensors at this batch size.", _SYMBOLIC),
    Metric("measured_ms", "ms", ",.3f", _LOWER,
           "Median measured time of an input, or of a step.",
           _RUN, heading="measured", column="some", spare=8, page=PageColumn(10, 115)),
    Metric("time_error_pct", "%", "+.1f", None, "Prediction relative to `measured_ms`, minus 1.",
           _RUN, heading="error", column="some", spare=6, page=PageColumn(11, 120)),
    Metric("predicted_ms", "ms", ",.3f", None, "Prediction for the way that it was run.", _RUN),
    Metric("measured_throughput_per_s", "per s", ",.2f", _HIGHER,
           "Measured inputs, or microbatches, per second.", _RUN),
    Metric("measured_peak_gib", "GiB", ".3f", _LOWER,
           "Largest measured peak of live tensors on any device or stage, weights included.", _RUN),
    Metric("predicted_peak_gib", "GiB", ".3f", None, "Prediction of `measured_peak_gib`.", _RUN),
    Metric("peak_error_pct", "%", "+.1f", None,
           "Prediction relative to `measured_peak_gib`, minus 1.", _RUN),
    Metric("max_difference", "", ".2g", _LOWER,
           "Largest difference from the results, or the loss, of the unsplit model.", _RUN),
    Metric("allocator_peak_gib", "GiB", ".3f", _LOWER,
           "Largest peak of torch's allocator on any CUDA device of a local run.", _RUN),
    Metric("unsplit_ms", "ms", ",.3f", None,
           "Median time of the unsplit model, measured in a local run.", _RUN),
    Metric("gradient_difference", "", ".2g", _LOWER,
           "Largest relative difference of a gradient from the unsplit model's.", _RUN),
)
"""The metrics logged by jobs, in the order of a report's columns."""

DERIVED = (
    Metric("example_ms", "ms", ",.3f", _LOWER,
           "1 / `examples_per_s`, by which jobs of several batch sizes, or with a schedule, are"
           " ranked.", heading="time per example", per="example"),
    Metric("token_ms", "ms", ",.3f", _LOWER,
           "1 / `tokens_per_s`, by which decodes and generations of several batch sizes or lengths"
           " are ranked.", heading="time per token of all texts", per="token"),
)
"""Metrics that reports derive from a job's."""

SERIES = (
    Metric("memory_gib", "GiB", ".3f", None,
           "Memory in use on an operator's device while it runs; the step is the operator's"
           " number."),
    Metric("search_best_ms", "ms", ",.3f", None,
           "Best latency found so far by a search; the step is the search time in ms.",
           "mode=optimal"),
    Metric("search_best_gib", "GiB", ".3f", None,
           "Best peak found so far with objective=memory; the step is the same.", "mode=optimal"),
    Metric("search_best_j", "J", ",.3f", None,
           "Best energy found so far with objective=energy; the step is the same.", "mode=optimal"),
)
"""Metrics over steps, which MLflow draws as lines."""
# fmt: on

BY_OBJECTIVE = {
    "latency": ("latency_ms", "optimality_gap_pct"),
    "throughput": ("load_ms", "load_gap_pct"),
    "memory": ("peak_memory_gib", "memory_gap_pct"),
    "energy": ("energy_j", "energy_gap_pct"),
}
"""The metric that each objective minimizes, and its gap to a lower bound. Jobs with the same
objective are ranked by its metric, and reports show its gap."""

BY_NAME = {metric.name: metric for metric in (*METRICS, *DERIVED, *SERIES)}


def page_columns(*, common: bool) -> dict[str, int]:
    """Return the metrics of MLflow's comparison page in order, with the widths of their columns.

    The `common` ones come before the most common parameters, the others after them.
    """
    columns = [(metric.page, metric.name) for metric in METRICS if metric.page]
    return {name: page.width for page, name in sorted(columns) if (page.place < 20) is common}


@dataclass(frozen=True, slots=True)
class DeviceMetric:
    """A column of the table of devices, in the terminal and in MLflow."""

    name: str
    """Its name in MLflow's table ``devices``."""
    unit: str
    """Its unit there; the terminal chooses one that suits the numbers."""
    field: str
    """Field of `DeviceUse`, in bytes or seconds if the unit is one of size or time."""
    sentence: str
    heading: str = ""
    """Heading in the terminal; empty if not shown there."""
    scale: Literal["", "held", "memory", "load", "received"] = ""
    """Group of columns that share a unit in the terminal."""
    optional: bool = False
    """Whether it is left out if it is 0 for all devices."""
    spare: int = 0
    """Narrow terminals drop columns in this order; 0 always stays. 1 is the load in %."""

    def amount(self, use: "DeviceUse") -> float | str:
        """Return the value: a number, in bytes or seconds if it has a unit, or a name."""
        value: float | str | tuple[int, ...] = getattr(use, self.field)
        return len(value) if isinstance(value, tuple) else value

    def logged(self, use: "DeviceUse") -> object:
        """Return the value for MLflow's table, in `unit`."""
        amount = self.amount(use)
        if isinstance(amount, str) or not self.unit:
            return amount
        return amount / GIB if self.unit == "GiB" else amount * 1e3


# fmt: off
DEVICE_METRICS = (
    DeviceMetric("device", "", "logical_id", "Number of the device, from 0.", "id"),
    DeviceMetric("accelerator", "", "name", "Type of the device.", "accelerator"),
    DeviceMetric("partitions", "", "partitions", "Partitions on the device.", "parts"),
    DeviceMetric("operators", "", "operators", "Operators of these partitions.", "ops", spare=2),
    DeviceMetric("weights_gib", "GiB", "weight_bytes",
                 "Weights of these partitions.", "weights", "held"),
    DeviceMetric("optimizer_state_gib", "GiB", "state_bytes",
                 "Optimizer state of these weights.", "state", "held", optional=True),
    DeviceMetric("kv_cache_gib", "GiB", "cache_bytes",
                 "State kept between tokens (KV cache).", "cache", "held",
                 optional=True),
    DeviceMetric("peak_gib", "GiB", "peak_bytes", "Peak memory.",
                 "peak", "held"),
    DeviceMetric("static_gib", "GiB", "static_bytes",
                 "Memory if nothing were ever freed."),
    DeviceMetric("memory_gib", "GiB", "total_bytes", "Memory of the device.", "memory", "memory",
                 spare=4),
    DeviceMetric("reserved_gib", "GiB", "reserved_bytes", "Memory not available to tensors.",
                 optional=True),
    DeviceMetric("free_gib", "GiB", "free_bytes", "Memory free for tensors at the peak.",
                 "free", "memory"),
    DeviceMetric("load_ms", "ms", "load_s", "Compute time for one input.",
                 "load", "load"),
    DeviceMetric("received_gib", "GiB", "received_bytes", "Bytes received for one input.",
                 "received", "received", spare=3),
)
"""The columns of the table of devices, in order."""
# fmt: on


_PAGE = """\
# Metrics

Printed by `python -m runner.output.metrics` from the tables in `runner/output/metrics.py`. Exact
definitions: [accounting.md](accounting.md).

## Of a job

In `result.json`, in MLflow, and for `hydra.sweeper.metric`. The column *needs* names the
configuration without which a metric is not logged.

{jobs}

Derived by reports:

{derived}

Plotted by MLflow as curves:

{series}

## Of each device

In MLflow's table `devices`; most are also printed in the terminal.

{devices}
"""


def metrics_page() -> str:
    """Return the text of docs/metrics.md."""
    devices = [(f"`{m.name}`", m.unit, m.sentence) for m in DEVICE_METRICS]
    return _PAGE.format(
        jobs=_metrics_table(sorted(METRICS, key=lambda metric: bool(metric.jobs))),
        derived=_metrics_table(DERIVED),
        series=_metrics_table(SERIES),
        devices=_table(("column", "unit", "what it is"), devices),
    )


def _metrics_table(metrics: Iterable[Metric]) -> str:
    rows = [(f"`{m.name}`", m.unit, m.better or "", m.jobs, m.sentence) for m in metrics]
    return _table(("metric", "unit", "better", "needs", "what it is"), rows)


def _table(headings: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = (headings, ("---",) * len(headings), *rows)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


if __name__ == "__main__":
    sys.stdout.write(metrics_page())
