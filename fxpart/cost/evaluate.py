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
from fxpart.graph import FloatArray, IntArray, OpGraph
from fxpart.problem import Problem

__all__ = ["evaluate", "peak_bytes"]


def peak_bytes(memory: MemoryTables, device_of: IntArray, devices: int) -> IntArray:
    """Return the liveness peak of each device in bytes, shape (D,)."""
    change = np.empty(len(device_of) + 1, dtype=np.int64)
    peaks = [peak_on_device(memory, device_of, device, change) for device in range(devices)]
    return np.array(peaks, dtype=np.int64)


def evaluate(problem: Problem, assignment: Assignment) -> Evaluation:
    """Return latency, throughput, memory and transfers of `assignment`, and the lower bound."""
    device_of = assignment.device_of
    costs = problem.costs
    latency, start, finish, transfers = _simulate(costs, device_of)
    loads = np.bincount(
        device_of,
        weights=costs.op_time_s[np.arange(len(device_of)), device_of],
        minlength=problem.topology.n_devices,
    ).astype(np.float64)
    carried = problem.graph.value_bytes[transfers.value]
    busiest = max(float(loads.max()), _busiest_link_s(transfers, problem.topology.n_devices))
    return Evaluation(
        latency_s=latency,
        throughput_per_s=1.0 / busiest if busiest > 0 else float("inf"),
        critical_path_s=float(critical_path_s(costs, device_of)),
        lower_bound_s=lower_bound_s(costs),
        transfer_bytes=int(carried.sum()),
        partitions=assignment.n_partitions,
        devices=_device_uses(problem, assignment, loads, transfers),
        op_start_s=start,
        op_finish_s=finish,
        transfers=transfers,
        memory=tuple(
            _profile(problem.memory, device_of, device, start)
            for device in range(problem.topology.n_devices)
        ),
    )


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


def _device_uses(
    problem: Problem, assignment: Assignment, loads: FloatArray, transfers: Transfers
) -> tuple[DeviceUse, ...]:
    device_of, graph = assignment.device_of, problem.graph
    peaks = peak_bytes(problem.memory, device_of, problem.topology.n_devices)
    carried = graph.value_bytes[transfers.value]
    uses = []
    for device, spec in enumerate(problem.topology.devices):
        mine = device_of == device
        homes = assignment.devices_of_partition
        uses.append(
            DeviceUse(
                logical_id=device,
                name=spec.name,
                operators=int(mine.sum()),
                partitions=tuple(p for p, home in enumerate(homes) if home[0] == device),
                weight_bytes=_weight_bytes(graph, mine),
                peak_bytes=int(peaks[device]),
                static_bytes=int(static_on_device(problem.memory, device_of, device)),
                memory_bytes=spec.memory_bytes,
                load_s=float(loads[device]),
                received_bytes=int(carried[transfers.target == device].sum()),
            )
        )
    return tuple(uses)


def _weight_bytes(graph: OpGraph, mine: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> int:
    user = np.repeat(np.arange(graph.n_ops), np.diff(graph.use_start))
    return int(graph.weight_bytes[np.unique(graph.uses[mine[user]])].sum())


def _profile(
    memory: MemoryTables, device_of: IntArray, device: int, start_s: FloatArray
) -> MemoryProfile:
    change = np.empty(len(device_of) + 1, dtype=np.int64)
    resident, _ = device_memory(memory, device_of, device, change)
    ops = np.flatnonzero(device_of == device).astype(np.int64)
    held = resident + np.cumsum(change[:-1])[ops]
    return MemoryProfile(ops, start_s[ops], held)
