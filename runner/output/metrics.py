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
    "DERIVED",
    "DEVICE_METRICS",
    "LAST_SPARE",
    "METRICS",
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
    """Position: columns are in this order, and from 10 on after the most common parameters."""
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
_ONE_INPUT = "neither `schedule` nor replicas"

# fmt: off
METRICS = (
    Metric("latency_ms", "ms", ",.3f", _LOWER, "Simulated time of one input through the model.",
           heading="latency", column="plain", page=PageColumn(1, 90)),
    Metric("optimality_gap_pct", "%", ".1f", _LOWER,
           "How far the latency is above the lower bound.", _ONE_INPUT,
           heading="gap", column="bounded", spare=2, page=PageColumn(15, 140)),
    Metric("peak_memory_gib", "GiB", ".3f", _LOWER,
           "The most that any device holds at once: weights, inputs and live tensors.",
           heading="peak", column="mixed", page=PageColumn(2, 125)),
    Metric("device_memory_gib", "GiB", ".3f", _LOWER,
           "What the device that needs most is expected to need, as nvidia-smi shows it: with the"
           " context, the allocator and workspaces.",
           page=PageColumn(14, 130)),
    Metric("device_memory_gib_low", "GiB", ".3f", None, "The least that it may be."),
    Metric("device_memory_gib_high", "GiB", ".3f", None,
           "The most that it may be; the plan is tight where a device has less."),
    Metric("memory_is_tight", "", ".0f", _LOWER,
           "1 where some device holds what is expected and not the most that it may be."),
    Metric("examples_per_s", "examples/s", ",.2f", _HIGHER,
           "Examples: of a stream of inputs, of training steps one after the other, of a schedule;"
           " texts of generations one after the other.",
           heading="throughput", column="some", spare=5, page=PageColumn(4, 115)),
    Metric("mfu_pct", "%", ".1f", _HIGHER,
           "Model FLOPs utilization: the FLOPs of the forward, and twice as many of a backward (of"
           " frozen weights as many), of the peak of all devices in that time.",
           heading="MFU", column="trained", spare=1, page=PageColumn(16, 85)),
    Metric("schedule_peak_gib", "GiB", ".3f", _LOWER,
           "The most that any device holds in a step of the schedule.",
           _SCHEDULE, heading="peak", column="scheduled"),
    Metric("step_ms", "ms", ",.3f", _LOWER,
           "Simulated time of a step: all microbatches, sums over replicas, updates.",
           _SCHEDULE, heading="step", column="scheduled", spare=1, page=PageColumn(5, 90)),
    Metric("bubble_pct", "%", ".1f", _LOWER,
           "Share of the devices' time in a step in which they wait.",
           _SCHEDULE, heading="bubble", column="scheduled", spare=3, page=PageColumn(6, 100)),
    Metric("load_ms", "ms", ",.3f", _LOWER,
           "The largest load of any device or link for one input of a stream.", _THROUGHPUT,
           heading="load", column="some", spare=8),
    Metric("memory_bound_gib", "GiB", ".3f", None,
           "No placement of whole operators on these devices has a fullest device with less.",
           _MEMORY),
    Metric("memory_gap_pct", "%", ".1f", _LOWER,
           "How far the fullest device is above that bound.", _MEMORY),
    Metric("energy_j", "J", ",.3f", _LOWER,
           "Energy of one input: the boards' rated power while they compute, 15 % of it while those"
           " in use wait.", _ENERGY, heading="energy", column="some", spare=8),
    Metric("energy_bound_j", "J", ",.3f", None,
           "No placement of whole operators on these devices takes less.", _ENERGY),
    Metric("energy_gap_pct", "%", ".1f", _LOWER,
           "How far the energy is above that bound.", _ENERGY),
    Metric("load_bound_ms", "ms", ",.3f", None,
           "No placement of whole operators on these devices has a lower largest load.",
           _THROUGHPUT),
    Metric("load_gap_pct", "%", ".1f", _LOWER,
           "How far the largest load is above that bound.", _THROUGHPUT),
    Metric("devices_used", "", ".0f", _LOWER, "Devices that compute anything.",
           heading="devices used", column="differs", spare=7, page=PageColumn(12, 105)),
    Metric("partitions", "", ".0f", None,
           "Runs of operators of one device in which nothing has to come back from another.",
           heading="parts", column="always", spare=4, page=PageColumn(3, 85)),
    Metric("replicas", "", ".0f", None,
           "Devices that hold the partition with the most copies, which take inputs in turn."),
    Metric("feasible", "", ".0f", _HIGHER,
           "1 for a plan that fits; 0, and no other metric, where none does.",
           page=PageColumn(11, 75)),
    Metric("static_memory_gib", "GiB", ".3f", _LOWER,
           "The most that any device would hold if nothing were ever freed."),
    Metric("transfer_gib", "GiB", ".3f", _LOWER, "Sent between devices for one input.",
           page=PageColumn(13, 95)),
    Metric("lower_bound_ms", "ms", ",.3f", None,
           "No placement of whole operators on these devices has a lower latency."),
    Metric("critical_path_ms", "ms", ",.3f", _LOWER,
           "Longest path with transfers, as if a device ran any number of operators at once."),
    Metric("whole_modules_ms", "ms", ",.3f", _LOWER,
           "Latency of the best plan found that keeps modules whole.", _SEARCH),
    Metric("whole_modules_pct", "%", "+.1f", _LOWER,
           "How far that is above the latency of the plan.", _SEARCH),
    Metric("operators", "", ".0f", None, "Operators of the captured graph."),
    Metric("weights_gib", "GiB", ".3f", None, "All weights of the model, each once."),
    Metric("capture_s", "s", ".2f", None, "Wall time of the capture, or of reading it from disk."),
    Metric("partition_s", "s", ".2f", _LOWER, "Wall time of the mode."),
    Metric("gradients_gib", "GiB", ".3f", _LOWER,
           "Gradients at the peak of the fullest device.", _TRAINING),
    Metric("optimizer_state_gib", "GiB", ".3f", _LOWER,
           "What the optimizer keeps, at the peak of the fullest device.", _TRAINING),
    Metric("saved_activations_gib", "GiB", ".3f", _LOWER,
           "What the backward waits for, at the peak of the fullest device.", _TRAINING),
    Metric("kv_cache_gib", "GiB", ".3f", _LOWER,
           "What all devices, and tiers beside them, keep of texts from one token to the next.",
           _SERVING, heading="cache", column="some", spare=6),
    Metric("ttft_ms", "ms", ",.3f", _LOWER,
           "Time to the first token: of the pass over a prompt that fills the cache.",
           "phase=prefill or generate", heading="first token", column="some", spare=4),
    Metric("tpot_ms", "ms", ",.3f", _LOWER,
           "Time per output token: of one token for each text against its cache; of a generation"
           " the mean.",
           "phase=decode or generate", heading="per token", column="some", spare=4),
    Metric("tokens_per_s", "per s", ",.2f", _HIGHER,
           "Tokens of all texts of the batch: `model.seq_len` of each, or of a decode one a"
           " step; those of a generation over its whole time.",
           "model.seq_len", heading="tokens", column="tokens", spare=8),
    Metric("max_batch", "", ".0f", _HIGHER,
           "The most texts of prompt_len + output_len tokens that the plan holds.",
           _GENERATE, heading="max batch", column="some", spare=6),
    Metric("max_context", "", ",.0f", _HIGHER,
           "The most tokens of each text of the batch that the plan holds, prompts as they are.",
           _GENERATE, heading="max context", column="some", spare=7),
    Metric("max_batch_in_tiers", "", ".0f", _HIGHER,
           "The same with all in tiers that can lie there.", "phase=generate with a tier"),
    Metric("max_context_in_tiers", "", ",.0f", _HIGHER,
           "The same with all in tiers that can lie there.", "phase=generate with a tier"),
    Metric("price_per_hour", "USD", ",.2f", _LOWER, "Of all devices, idle ones too.", _PRICE),
    Metric("price_per_million_examples", "USD", ",.4g", _LOWER,
           "That price over `examples_per_s`; of a decode, which makes tokens, there is none.",
           _PRICE),
    Metric("price_per_million_tokens", "USD", ",.4g", _LOWER,
           "That price over `tokens_per_s`.", _PRICED_TOKENS,
           heading="per 1M tokens", column="some", spare=5),
    Metric("streamed_gib", "GiB", ".3f", _LOWER,
           "What is copied to devices from a tier for one input.", _TIERS,
           heading="streamed", column="some", spare=6),
    Metric("hosted_gib", "GiB", ".3f", None, "What the host holds for modules that run there.",
           _TIERS),
    Metric("host_memory_gib", "GiB", ".3f", _LOWER,
           "What the host holds in all: that, what is streamed, and room for what passes through.",
           _TIERS),
    Metric("disk_gib", "GiB", ".3f", _LOWER, "What is streamed from the disk.", _TIERS),
    Metric("pushed_gib", "GiB", ".3f", _LOWER,
           "What devices write to a tier for one input: caches, gradients.", _TIERS),
    Metric("tier_cache_gib", "GiB", ".3f", None, "Caches that lie in a tier.", _TIERS),
    Metric("copy_wait_ms", "ms", ",.3f", _LOWER,
           "By how much the copies make the latency longer.", _TIERS),
    Metric("data_parallel", "", ".0f", None, "Replicas that share the batch.", _REPLICAS),
    Metric("all_reduce_gib", "GiB", ".3f", _LOWER,
           "The most that any device sums over the replicas.", _REPLICAS),
    Metric("all_reduce_ms", "ms", ",.3f", _LOWER,
           "The most time that any device takes for these sums.", _REPLICAS),
    Metric("exposed_all_reduce_ms", "ms", ",.3f", _LOWER,
           "The most of that time that any device waits.", _REPLICAS),
    Metric("tensor_parallel", "", ".0f", None, "Devices that share every operator.", _SPLIT),
    Metric("collectives", "", ".0f", _LOWER,
           "Those of the busiest group in one input, or in all microbatches of a step, and those of"
           " ZeRO.",
           _COLLECTIVES),
    Metric("collective_gib", "GiB", ".3f", _LOWER,
           "What these sum, gather or scatter.", _COLLECTIVES),
    Metric("collective_ms", "ms", ",.3f", _LOWER,
           "The most time that any device takes for collectives.", _COLLECTIVES),
    Metric("exposed_collective_ms", "ms", ",.3f", _LOWER,
           "The most of that time in which a device computes nothing.", _COLLECTIVES),
    Metric("max_batch_size", "", ".0f", _HIGHER,
           "The largest batch whose tensors fit the plan, of all replicas together.", _SYMBOLIC),
    Metric("smallest_device_memory_gib", "GiB", ".3f", _LOWER,
           "What the fullest device needs for tensors at this batch size.", _SYMBOLIC),
    Metric("measured_ms", "ms", ",.3f", _LOWER,
           "Median time of an input, or of a step, as run here.",
           _RUN, heading="measured", column="some", spare=8, page=PageColumn(7, 115)),
    Metric("time_error_pct", "%", "+.1f", None, "How far the prediction is above `measured_ms`.",
           _RUN, heading="error", column="some", spare=6, page=PageColumn(8, 120)),
    Metric("predicted_ms", "ms", ",.3f", None, "Prediction for the way in which it was run.", _RUN),
    Metric("measured_throughput_per_s", "per s", ",.2f", _HIGHER,
           "Inputs, or microbatches, as run here.", _RUN),
    Metric("measured_peak_gib", "GiB", ".3f", _LOWER,
           "The most live tensors on any device or stage, weights included.", _RUN),
    Metric("predicted_peak_gib", "GiB", ".3f", None, "Prediction of `measured_peak_gib`.", _RUN),
    Metric("peak_error_pct", "%", "+.1f", None,
           "How far the prediction is above `measured_peak_gib`.", _RUN),
    Metric("max_difference", "", ".2g", _LOWER,
           "Largest difference from the results, or the loss, of the unsplit model.", _RUN),
    Metric("allocator_peak_gib", "GiB", ".3f", _LOWER,
           "The most that torch's allocator gave out on any CUDA device of a local run.", _RUN),
    Metric("unsplit_ms", "ms", ",.3f", None,
           "Median time of the unsplit model beside a local run.", _RUN),
    Metric("gradient_difference", "", ".2g", _LOWER,
           "Largest share by which a gradient of training differs from the unsplit model's.", _RUN),
)
"""The metrics logged by jobs, in the order of a report's columns."""

DERIVED = (
    Metric("example_ms", "ms", ",.3f", _LOWER,
           "1 / `examples_per_s`: what jobs of several batch sizes, or with a schedule, are ranked"
           " by.", heading="time per example", per="example"),
)
"""Metrics that reports derive from a job's."""

SERIES = (
    Metric("memory_gib", "GiB", ".3f", None,
           "Held while an operator runs, on its device; the step is the operator's number."),
    Metric("search_best_ms", "ms", ",.3f", None,
           "The best that a search has found so far; the step is its time in ms.", "mode=optimal"),
    Metric("search_best_gib", "GiB", ".3f", None, "The same of objective=memory.", "mode=optimal"),
    Metric("search_best_j", "J", ",.3f", None, "The same of objective=energy.", "mode=optimal"),
)
"""Metrics over steps, which MLflow draws as lines."""
# fmt: on

BY_NAME = {metric.name: metric for metric in (*METRICS, *DERIVED, *SERIES)}


def page_columns(*, common: bool) -> dict[str, int]:
    """Return the metrics of MLflow's comparison page in order, with the widths of their columns.

    The `common` ones come before the most common parameters, the others after them.
    """
    columns = [(metric.page, metric.name) for metric in METRICS if metric.page]
    return {name: page.width for page, name in sorted(columns) if (page.place < 10) is common}


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
    DeviceMetric("device", "", "logical_id", "Its number, from 0.", "id"),
    DeviceMetric("accelerator", "", "name", "What it is.", "accelerator"),
    DeviceMetric("partitions", "", "partitions", "Partitions that it holds.", "parts"),
    DeviceMetric("operators", "", "operators", "Operators of these.", "ops", spare=2),
    DeviceMetric("weights_gib", "GiB", "weight_bytes", "Weights of these.", "weights", "held"),
    DeviceMetric("optimizer_state_gib", "GiB", "state_bytes",
                 "What an optimizer keeps for the weights.", "state", "held", optional=True),
    DeviceMetric("kv_cache_gib", "GiB", "cache_bytes",
                 "What it keeps of texts from one token to the next.", "cache", "held",
                 optional=True),
    DeviceMetric("peak_gib", "GiB", "peak_bytes", "The most that it holds at once.",
                 "peak", "held"),
    DeviceMetric("static_gib", "GiB", "static_bytes",
                 "What it would hold if nothing were ever freed."),
    DeviceMetric("memory_gib", "GiB", "total_bytes", "Its memory.", "memory", "memory",
                 spare=4),
    DeviceMetric("reserved_gib", "GiB", "reserved_bytes", "What of that is not for tensors.",
                 optional=True),
    DeviceMetric("free_gib", "GiB", "free_bytes", "What is left for tensors at the peak.",
                 "free", "memory"),
    DeviceMetric("load_ms", "ms", "load_s", "Time that it computes for one input.",
                 "load", "load"),
    DeviceMetric("received_gib", "GiB", "received_bytes", "Sent to it for one input.",
                 "received", "received", spare=3),
)
"""The columns of the table of devices, in order."""
# fmt: on


_PAGE = """\
# Metrics

Printed by `python -m runner.output.metrics` from the tables in `runner/output/metrics.py`. What the
numbers mean exactly: [accounting.md](accounting.md).

## Of a job

In `result.json`, in MLflow, and for `hydra.sweeper.metric`. Some need a part of the configuration.

{jobs}

Reports work these out:

{derived}

MLflow draws these as lines:

{series}

## Of each device

In MLflow's table `devices`, most of them in the terminal.

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
