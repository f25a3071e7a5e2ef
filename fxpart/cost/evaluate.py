"""What an assignment costs: one call that every mode, report and test uses."""

import numpy as np

from fxpart.assignment import Assignment
from fxpart.cost.bounds import critical_path_s, lower_bound_s
from fxpart.cost.evaluation import DeviceUse, Evaluation, MemoryProfile, Transfers
from fxpart.cost.kernels import (
    device_memory,
    peak_on_device,
    schedule,
    schedule_log,
    static_on_device,
)
from fxpart.cost.tables import CostTables, MemoryTables
from fxpart.errors import SpecError
from fxpart.graph import FloatArray, IntArray, OpGraph
from fxpart.problem import Problem

__all__ = ["evaluate", "peak_bytes"]


def peak_bytes(memory: MemoryTables, device_of: IntArray, devices: int) -> IntArray:
    """Return the liveness peak of each device in bytes, shape (D,)."""
    change = np.empty(len(device_of) + 1, dtype=np.int64)
    peaks = [peak_on_device(memory, device_of, device, change) for device in range(devices)]
    return np.array(peaks, dtype=np.int64)


def evaluate(problem: Problem, assignment: Assignment) -> Evaluation:
    """Return latency, throughput, memory and transfers of `assignment`, and the lower bound.

    Raises:
        SpecError: when the assignment is of another graph or names devices that are not there.

    """
    device_of = assignment.device_of
    _check(problem, device_of)
    costs = problem.costs
    latency, start, finish, transfers = _simulate(costs, device_of)
    loads = np.bincount(
        device_of,
        weights=costs.op_time_s[np.arange(len(device_of)), device_of],
        minlength=problem.topology.n_devices,
    ).astype(np.float64)
    carried = problem.graph.value_bytes[transfers.value]
    busiest = max(float(loads.max()), _busiest_link_s(transfers, problem.topology.n_devices))
    held = [_held(problem.memory, device_of, d) for d in range(problem.topology.n_devices)]
    return Evaluation(
        latency_s=latency,
        throughput_per_s=1.0 / busiest if busiest > 0 else float("inf"),
        critical_path_s=float(critical_path_s(costs, device_of)),
        lower_bound_s=lower_bound_s(costs),
        transfer_bytes=int(carried.sum()),
        partitions=assignment.n_partitions,
        devices=tuple(
            _device_use(
                problem,
                assignment,
                device,
                held=held[device],
                load_s=float(loads[device]),
                received_bytes=received,
            )
            for device, received in enumerate(_received_bytes(transfers, carried, len(held)))
        ),
        op_start_s=start,
        op_finish_s=finish,
        transfers=transfers,
        memory=tuple(
            MemoryProfile(ops, start[ops], held[device][ops])
            for device in range(len(held))
            for ops in [np.flatnonzero(device_of == device).astype(np.int64)]
        ),
    )


def _check(problem: Problem, device_of: IntArray) -> None:
    # Compiled code does not look where it reads: what it is given must be right.
    if len(device_of) != problem.graph.n_ops:
        raise SpecError(
            f"the assignment places {len(device_of)} operators, the model has"
            f" {problem.graph.n_ops}; make it for this model"
        )
    if device_of.min() < 0 or device_of.max() >= problem.topology.n_devices:
        raise SpecError(
            f"the assignment uses device {int(device_of.max())}, there are"
            f" {problem.topology.n_devices}; make it for this topology"
        )


def _held(memory: MemoryTables, device_of: IntArray, device: int) -> IntArray:
    """Return the bytes on one device at each operator of the whole graph; none if it has none."""
    change = np.empty(len(device_of) + 1, dtype=np.int64)
    resident, operators = device_memory(memory, device_of, device, change)
    held: IntArray = resident + np.cumsum(change[:-1])
    return held if operators else np.zeros_like(held)


def _received_bytes(transfers: Transfers, carried: IntArray, devices: int) -> list[int]:
    received = np.zeros(devices, dtype=np.int64)
    np.add.at(received, transfers.target, carried)
    return [int(size) for size in received]


def _simulate(
    costs: CostTables, device_of: IntArray
) -> tuple[float, FloatArray, FloatArray, Transfers]:
    log = schedule_log(costs)
    latency, count = schedule(costs, device_of, log)
    sent, sent_s = log.sent[:count].copy(), log.sent_s[:count].copy()
    moves = Transfers(sent[:, 0], sent[:, 1], sent[:, 2], sent_s[:, 0], sent_s[:, 1])
    return float(latency), log.start_s, log.finish_s, moves


def _busiest_link_s(transfers: Transfers, devices: int) -> float:
    if len(transfers.value) == 0:
        return 0.0
    link = transfers.source * devices + transfers.target
    return float(np.bincount(link, weights=transfers.finish_s - transfers.start_s).max())


def _device_use(
    problem: Problem,
    assignment: Assignment,
    device: int,
    *,
    held: IntArray,
    load_s: float,
    received_bytes: int,
) -> DeviceUse:
    device_of, spec = assignment.device_of, problem.topology.devices[device]
    mine = device_of == device
    homes = assignment.devices_of_partition
    return DeviceUse(
        logical_id=device,
        name=spec.name,
        operators=int(mine.sum()),
        partitions=tuple(p for p, home in enumerate(homes) if home[0] == device),
        weight_bytes=_weight_bytes(problem.graph, mine),
        peak_bytes=int(held.max()),
        static_bytes=int(static_on_device(problem.memory, device_of, device)),
        memory_bytes=spec.memory_bytes,
        load_s=load_s,
        received_bytes=received_bytes,
    )


def _weight_bytes(graph: OpGraph, mine: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> int:
    user = np.repeat(np.arange(graph.n_ops), np.diff(graph.use_start))
    return int(graph.weight_bytes[np.unique(graph.uses[mine[user]])].sum())
