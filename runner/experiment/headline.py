"""The metrics of a run; `runner.output.metrics` describes each of them."""

from runner.experiment.batch_report import batch_metrics
from runner.experiment.device_memory import device_memory_metrics
from runner.experiment.generation import generation_metrics
from runner.experiment.measurement import measured_metrics
from runner.experiment.memory_report import training_metrics
from runner.experiment.objective import objective_metrics, search_series
from runner.experiment.offload import offload_metrics
from runner.experiment.pipeline_schedule import schedule_metrics
from runner.experiment.rates import model_flops_utilization, rate_metrics
from runner.experiment.replicas import replica_metrics
from runner.experiment.result import Result
from runner.experiment.serving import serving_metrics
from runner.experiment.tensor_split import split_metrics
from runner.experiment.whole_modules import whole_metrics
from runner.experiment.zero import zero_metrics
from runner.output.metrics import DEVICE_METRICS
from runner.output.units import GIB

__all__ = ["INFEASIBLE", "device_columns", "headline", "memory_series"]

INFEASIBLE = {"feasible": 0.0}
"""The metrics of a run without a feasible placement."""


def headline(result: Result) -> dict[str, float]:
    """Return the metrics of a finished run by name."""
    e, graph, uses = result.evaluation, result.captured.graph, result.device_uses
    used = sum(use.operators > 0 for use in uses)
    serving = _serving_metrics(result)
    return {
        "latency_ms": e.latency_s * 1e3,
        "examples_per_s": _examples_per_s(result),
        "partitions": float(e.partitions),
        "devices_used": float(used * _alike(result)),
        "replicas": float(e.replicas),
        "peak_memory_gib": result.peak_bytes / GIB,
        **device_memory_metrics(result.device_needs),
        "static_memory_gib": max(use.static_bytes for use in uses) / GIB,
        "transfer_gib": e.transfer_bytes / GIB,
        "lower_bound_ms": e.lower_bound_s * 1e3,
        "critical_path_ms": e.critical_path_s * 1e3,
        **({"optimality_gap_pct": e.optimality_gap * 100} if result.has_gap else {}),
        "feasible": 1.0,
        "capture_s": result.captured.seconds,
        "partition_s": result.partition_s,
        "operators": float(graph.n_ops),
        "weights_gib": graph.total_weight_bytes / GIB,
        **objective_metrics(result.problem, e, result.n_devices),
        **(training_metrics(result.device_peaks) if result.trains else {}),
        **serving,
        **_rate_metrics(result, serving.get("tokens_per_s")),
        **(replica_metrics(result.replicas) if result.replicas else {}),
        **_collective_metrics(result),
        **(offload_metrics(result.offloaded, _ranks(result)) if result.offloaded else {}),
        **(batch_metrics(result.batches) if result.batches else {}),
        **(schedule_metrics(result.schedule) if result.schedule else {}),
        **(whole_metrics(result.whole) if result.whole else {}),
        **(measured_metrics(result.measured) if result.measured else {}),
    }


def _ranks(result: Result) -> int:
    """Return the number of devices in each tensor-parallel group."""
    return result.split.size if result.split else 1


def _alike(result: Result) -> int:
    """Return the number of devices that a row stands for: its group, in all replicas."""
    return _ranks(result) * (result.replicas.parallel.n_replicas if result.replicas else 1)


def _serving_metrics(result: Result) -> dict[str, float]:
    if result.step is None:
        return {}
    devices_per_row = _alike(result)
    values = serving_metrics(
        result.step,
        result.batch_size,
        result.evaluation,
        result.schedule,
        alike=devices_per_row,
    )
    if result.offloaded:
        values["kv_cache_gib"] += devices_per_row * int(result.offloaded.cache_bytes.sum()) / GIB
    return values | (generation_metrics(result.generation) if result.generation else {})


def _collective_metrics(result: Result) -> dict[str, float]:
    """Return the cost of collectives, of tensor parallelism and ZeRO together."""
    values = split_metrics(result.split) if result.split else {}
    for name, value in (zero_metrics(result.shards) if result.shards else {}).items():
        values[name] = values.get(name, 0.0) + value
    return values


def _rate_metrics(result: Result, decoded_per_s: float | None) -> dict[str, float]:
    """Return tokens per second, MFU and prices; `decoded_per_s` are the tokens/s of a decode."""
    examples_per_s, tokens_per_s = _examples_per_s(result), decoded_per_s
    steps_per_s = examples_per_s / result.batch_size
    if decoded_per_s is not None and not result.schedule:  # its steps run one after another
        latency_s = result.evaluation.latency_s
        steps_per_s = 1.0 / latency_s if latency_s else float("inf")
    elif decoded_per_s is None and result.tokens is not None:
        tokens_per_s = examples_per_s * result.tokens
    graph = result.captured.graph
    if len(graph.gradient_values):  # a shard of a frozen weight is not told from other values
        graph = result.subject.unconverted or graph
    utilization = model_flops_utilization(graph, result.problem.topology, steps_per_s)
    # A decode produces tokens. Batches that overlap without a schedule would need more caches.
    whole_per_s = None if result.step == "decode" and not result.generation else examples_per_s
    return rate_metrics(whole_per_s, tokens_per_s, utilization, result.price_per_hour)


def _examples_per_s(result: Result) -> float:
    """Return the throughput of a stream of inputs, or of consecutive steps or generations.

    A step of training needs the weights updated by the one before it, and a decode its tokens. An
    example of a generation is a text, from its prompt to its last token.
    """
    if result.generation:
        return result.generation.texts_per_s
    if result.schedule:  # counts microbatches, each of the batch size
        return result.schedule.throughput_per_s * result.batch_size
    evaluation = result.evaluation
    if not result.trains and result.step != "decode":
        return evaluation.throughput_per_s * result.batch_size
    return result.batch_size / evaluation.latency_s if evaluation.latency_s else float("inf")


def device_columns(result: Result) -> dict[str, list[object]]:
    """Return the columns of the device table, without optional columns of zeros."""
    columns = {
        metric.name: [metric.logged(use) for use in result.evaluation.devices]
        for metric in DEVICE_METRICS
    }
    empty = {m.name for m in DEVICE_METRICS if m.optional and not any(columns[m.name])}
    return {name: values for name, values in columns.items() if name not in empty}


def memory_series(result: Result) -> dict[str, list[tuple[int, float]]]:
    """Return series of points by metric: GiB held during each operator, and the search's best."""
    points = [
        (int(op), float(held_bytes) / GIB)
        for profile in result.evaluation.memory
        for op, held_bytes in zip(profile.op, profile.held_bytes, strict=True)
    ]
    return {"memory_gib": sorted(points), **search_series(result.curve)}
