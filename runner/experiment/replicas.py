"""Data parallelism: replicas that share the batch, and the cost of their all-reduces."""

from dataclasses import dataclass, replace

from fxpart.core.assignment import Assignment
from fxpart.core.data_parallel import DataParallel, check_replica_count
from fxpart.core.graph import IntArray
from fxpart.cost.all_reduce import AllReduce, all_reduce_cost, check_bucket_bytes
from fxpart.cost.collectives import CollectiveCurves
from fxpart.cost.evaluation import Evaluation
from fxpart.cost.problem import Problem
from fxpart.errors import NotApplicableError, SpecError
from runner.config.schema import Config
from runner.experiment.mesh import replica_count, replica_degrees
from runner.output.terminal import counted
from runner.output.units import GIB, format_s, format_size

__all__ = ["Replicas", "check_replicas", "replica_metrics", "replicas_line", "with_sums"]


@dataclass(frozen=True, eq=False, slots=True)
class Replicas:
    """The replicas of a placement and the cost of their all-reduces."""

    parallel: DataParallel
    cost: AllReduce


def check_replicas(config: Config) -> None:
    """Raise `SpecError` if the replicas conflict with the rest of `config`."""
    replicas = config.data_parallel
    check_replica_count(replicas)
    check_bucket_bytes(config.all_reduce.bucket_bytes)
    if replica_count(config) > 1 and config.devices.saturate_host:
        raise NotApplicableError(
            f"{replica_degrees(config)} copies the placement, and so does "
            "devices.saturate_host=true; leave out one of the two"
        )
    if replicas == 1:
        return
    if config.execute.name != "none":
        raise SpecError(
            f"data_parallel={replicas} can be planned, but not run here; leave out "
            f"execute={config.execute.name}, or data_parallel"
        )
    if config.capture.level != "operator":
        raise SpecError(
            f"data_parallel={replicas} follows the batch operator by operator, got"
            f" capture.level={config.capture.level}; use capture.level=operator"
        )


def with_sums(
    config: Config,
    problem: Problem,
    assignment: Assignment,
    *,
    evaluation: Evaluation,
    parallel: DataParallel,
    partial: IntArray,
    ranks: IntArray | None = None,
    curves: CollectiveCurves | None = None,
) -> tuple[Evaluation, Replicas]:
    """Return the `evaluation` of one replica with all-reduces in its times, and their cost.

    `ranks` are the numbers of replicas that sum each value, None for all; `curves` are of the links
    between replicas.
    """
    cost = all_reduce_cost(
        problem,
        assignment,
        evaluation,
        partial=partial,
        ranks=ranks,
        replicas=parallel,
        bucket_bytes=config.all_reduce.bucket_bytes,
        curves=curves,
    )
    whole = replace(evaluation, latency_s=cost.latency_s, throughput_per_s=cost.throughput_per_s)
    return whole, Replicas(parallel, cost)


def replicas_line(replicas: Replicas, group: int = 1) -> str:
    """Return a line on replicas and their cost; each device stands for a group of `group`."""
    cost, count = replicas.cost, replicas.parallel.n_replicas
    worst = int(cost.busy_s.argmax())
    devices = counted(replicas.parallel.replica.n_devices * group, "device")
    if not cost.reduced_bytes.any():
        return f"{count} replicas of {devices}, which all-reduce nothing"
    return (
        f"{count} replicas of {devices}; all-reduce of"
        f" {format_size(int(cost.reduced_bytes[worst]))} on device {worst} takes"
        f" {format_s(float(cost.busy_s[worst]))}, of which {format_s(float(cost.exposed_s[worst]))}"
        " are waited for"
    )


def replica_metrics(replicas: Replicas) -> dict[str, float]:
    """Return the metrics of replicas by name."""
    cost = replicas.cost
    return {
        "data_parallel": float(replicas.parallel.n_replicas),
        "all_reduce_gib": float(cost.reduced_bytes.max()) / GIB,
        "all_reduce_ms": float(cost.busy_s.max()) * 1e3,
        "exposed_all_reduce_ms": float(cost.exposed_s.max()) * 1e3,
    }
