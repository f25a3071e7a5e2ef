"""What limits a plan: the shares of time on its busiest device."""

from collections.abc import Mapping

import numpy as np

from fxpart.core.graph import FloatArray, IntArray
from fxpart.cost.collective_times import collective_kinds
from fxpart.cost.roofline import OperatorRates
from runner.config.schema import Config
from runner.experiment.operator_times import roofline_on
from runner.experiment.result import Result

__all__ = ["limit_of", "time_shares"]


_ROUNDING = 1e-9
_WORTH_A_WORD = 0.05


def limit_of(shares: Mapping[str, float], count: int | None = None) -> str:
    """Return the `count` largest of `time_shares`, or all: ``compute 69%, host 17%``."""
    large = sorted(
        ((-share, name) for name, share in shares.items() if share >= _WORTH_A_WORD),
    )
    return ", ".join(f"{name} {-share:.0%}" for share, name in large[:count])


def time_shares(config: Config, result: Result, *, streams: bool) -> dict[str, float]:
    """Return the shares of step time on the busiest device.

    With `streams`, shares are of the time between two inputs of a stream.

    ``compute`` and ``memory`` are operators bound by arithmetic or by memory bandwidth according to
    the roofline, ``links`` exposed collectives and transfers, including copies of weights from a
    tier, ``host`` the wait for kernel launches, and ``waiting`` the wait for other devices.
    """
    schedule, evaluation = result.schedule, result.evaluation
    costs, device_of = result.problem.costs, result.assignment.device_of
    n_devices = result.problem.topology.n_devices
    # Weights are updated once a step, not for each microbatch.
    microbatches = schedule.microbatches if schedule else 1
    times = np.where(result.problem.graph.is_update, 1, microbatches)
    own_s = costs.op_time_s[np.arange(len(device_of)), device_of] * times
    busy_s = np.bincount(device_of, weights=own_s, minlength=n_devices)
    device = int(busy_s.argmax())
    ops = np.flatnonzero(device_of == device)
    parts = _of_operators(config, result, device, ops, own_s[ops])
    total_s = evaluation.load_s if streams else evaluation.latency_s
    if schedule:
        total_s = schedule.step_s
    if result.shards:
        parts["links"] += result.shards.exposed_s
    if result.replicas:
        parts["links"] += float(result.replicas.cost.exposed_s[device])
    left_s = max(0.0, total_s - sum(parts.values()))
    if result.offloaded and not streams:
        waited_s = min(left_s, result.offloaded.waited_s)
        parts["links"] += waited_s
        left_s -= waited_s
    issued_s = np.diff(costs.issue_s, prepend=0.0) * times
    launches_s = float(issued_s.sum())
    copied = bool(streams and result.offloaded and result.offloaded.copies)
    if (evaluation.devices_used == 1 and not copied) or (
        streams and launches_s >= total_s * (1.0 - _ROUNDING)
    ):
        # A single device waits only for the host, or the host is the bottleneck of the stream.
        parts["host"], parts["waiting"] = left_s, 0.0
    elif streams:  # a link is the bottleneck of the stream
        parts["host"], parts["waiting"] = 0.0, 0.0
        parts["links"] += left_s
    else:
        # Every stage of a schedule has its own host process.
        started = ops if schedule else np.arange(len(own_s))
        behind_s = max(0.0, float(issued_s[started].sum() - own_s[started].sum()))
        parts["host"] = min(left_s, behind_s)
        parts["waiting"] = left_s - parts["host"]
    # Waits for all-reduces and all-gathers may overlap, so the parts may exceed the total.
    whole_s = sum(parts.values())
    return {name: seconds / whole_s if whole_s else 0.0 for name, seconds in parts.items()}


def _of_operators(
    config: Config, result: Result, device: int, ops: IntArray, seconds: FloatArray
) -> dict[str, float]:
    """Return the `seconds` of `ops`, all on `device`, by the resource that bounds them."""
    graph, spec = result.problem.graph, result.problem.topology.devices[device]
    flops_per_s, bytes_per_s = OperatorRates(graph, roofline_on(config.latency, spec)).on(spec)
    compute_s = graph.flops[ops] / flops_per_s[ops]
    memory_s = graph.moved_bytes[ops] / bytes_per_s[ops]
    exchanged = np.isin(ops, list(collective_kinds(graph)))
    computes = ~exchanged & (compute_s >= memory_s)
    return {
        "compute": float(seconds[computes].sum()),
        "memory": float(seconds[~exchanged & ~computes].sum()),
        "links": float(seconds[exchanged].sum()),
    }
