"""The numbers that sum up a run, under the names that every table, file and dashboard uses."""

from runner.experiment.batch_report import batch_metrics
from runner.experiment.experiment import Result
from runner.experiment.measured import measured_metrics
from runner.experiment.memory_report import training_bytes
from runner.experiment.pipeline_schedule import schedule_metrics
from runner.experiment.replicas import replica_metrics

__all__ = ["GIB", "INFEASIBLE", "device_columns", "headline", "memory_series"]

GIB = 2**30

INFEASIBLE = {"feasible": 0.0}
"""All that a run without a placement has to say."""


def headline(result: Result) -> dict[str, float]:
    """Return the metrics of a finished run; the unit is in the name, sizes are in GiB (2^30)."""
    e, graph = result.evaluation, result.captured.graph
    return {
        "latency_ms": e.latency_s * 1e3,
        "throughput_per_s": e.throughput_per_s,
        "examples_per_s": _examples_per_s(result),
        "partitions": float(e.partitions),
        "devices_used": float(e.devices_used),
        "replicas": float(e.replicas),
        "peak_memory_gib": e.peak_bytes / GIB,
        "static_memory_gib": max(use.static_bytes for use in e.devices) / GIB,
        "transfer_gib": e.transfer_bytes / GIB,
        "lower_bound_ms": e.lower_bound_s * 1e3,
        "critical_path_ms": e.critical_path_s * 1e3,
        "optimality_gap_pct": e.optimality_gap * 100,
        "feasible": 1.0,
        "capture_s": result.captured.seconds,
        "partition_s": result.partition_s,
        "operators": float(graph.n_ops),
        "weights_gib": graph.total_weight_bytes / GIB,
        **_training_metrics(result),
        **(replica_metrics(result.replicas) if result.replicas else {}),
        **(batch_metrics(result.batches) if result.batches else {}),
        **(schedule_metrics(result.schedule) if result.schedule else {}),
        **(measured_metrics(result.measured) if result.measured else {}),
    }


def _examples_per_s(result: Result) -> float:
    """Return the throughput in examples, which runs of several batch sizes can be compared by.

    A schedule runs microbatches, each of the batch size.
    """
    found = result.schedule or result.evaluation
    return found.throughput_per_s * result.batch_size


def _training_metrics(result: Result) -> dict[str, float]:
    """Return, of a training step, what the fullest device holds of it at its peak."""
    if not result.problem.graph.is_backward.any():
        return {}
    found = training_bytes(result.peaks)
    return {f"{name}_gib": size / GIB for name, size in found.items()}


def device_columns(result: Result) -> dict[str, list[object]]:
    """Return the per-device table, a list for each column.

    What is free is for tensors: less than what is not held, where some of it is reserved.
    """
    uses = result.evaluation.devices
    columns: dict[str, list[object]] = {
        "device": [use.logical_id for use in uses],
        "accelerator": [use.name for use in uses],
        "partitions": [len(use.partitions) for use in uses],
        "operators": [use.operators for use in uses],
        "weights_gib": [use.weight_bytes / GIB for use in uses],
        "optimizer_state_gib": [use.state_bytes / GIB for use in uses],
        "peak_gib": [use.peak_bytes / GIB for use in uses],
        "static_gib": [use.static_bytes / GIB for use in uses],
        "memory_gib": [use.total_bytes / GIB for use in uses],
        "reserved_gib": [use.reserved_bytes / GIB for use in uses],
        "free_gib": [use.free_bytes / GIB for use in uses],
        "load_ms": [use.load_s * 1e3 for use in uses],
        "received_gib": [use.received_bytes / GIB for use in uses],
    }
    # A run without an optimizer or a reserve has no columns of zeros for them.
    for name in ("optimizer_state_gib", "reserved_gib"):
        if not any(columns[name]):
            del columns[name]
    return columns


def memory_series(result: Result) -> list[tuple[int, float]]:
    """Return GiB held while each operator runs, on the device that runs it, by operator index."""
    points = [
        (int(op), float(held) / GIB)
        for profile in result.evaluation.memory
        for op, held in zip(profile.op, profile.held_bytes, strict=True)
    ]
    return sorted(points)
