"""The names of the metrics that a finished job may log, known before one has run."""

__all__ = ["ALWAYS", "OF_SOME_JOBS"]

ALWAYS = (
    "latency_ms",
    "throughput_per_s",
    "examples_per_s",
    "partitions",
    "devices_used",
    "replicas",
    "peak_memory_gib",
    "static_memory_gib",
    "transfer_gib",
    "lower_bound_ms",
    "critical_path_ms",
    "optimality_gap_pct",
    "feasible",
    "capture_s",
    "partition_s",
    "operators",
    "weights_gib",
)
"""Of every finished job."""
OF_SOME_JOBS = (
    # of training
    "gradients_gib",
    "optimizer_state_gib",
    "saved_activations_gib",
    # of replicas
    "data_parallel",
    "all_reduce_gib",
    "all_reduce_ms",
    "exposed_all_reduce_ms",
    # of symbolic sizes
    "max_batch_size",
    "smallest_device_memory_gib",
    # of a pipeline
    "step_ms",
    "bubble_pct",
    "microbatches_per_s",
    "schedule_peak_gib",
    # of a plan that is carried out
    "measured_ms",
    "predicted_ms",
    "time_error_pct",
    "measured_throughput_per_s",
    "measured_peak_gib",
    "predicted_peak_gib",
    "peak_error_pct",
    "max_difference",
    "allocator_peak_gib",
    "unsplit_ms",
    "gradient_difference",
)
"""Of those whose configuration asks for what they are about."""
