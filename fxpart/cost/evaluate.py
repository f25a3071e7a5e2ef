"""Cost of an assignment: the single entry point for every mode, report and test."""

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from fxpart.core.assignment import Assignment
from fxpart.core.graph import FloatArray, IntArray, OpGraph
from fxpart.cost.blocking import (
    device_loads_s,
    piece_latency,
    refuse_unfit,
    sample_latency_s,
)
from fxpart.cost.bounds import best_bounds, critical_path_s, formula_bounds, load_bound_s
from fxpart.cost.evaluation import DeviceUse, Evaluation, MemoryProfile, Transfers
from fxpart.cost.holding import Holding, holding
from fxpart.cost.kernels import ScheduleLog, peak_on_device, schedule, schedule_log
from fxpart.cost.piece_bound import sample_bound_s
from fxpart.cost.problem import Problem
from fxpart.cost.tables import CostTables, MemoryTables
from fxpart.errors import SpecError

__all__ = ["evaluate", "evaluate_unbounded", "peak_bytes", "with_bounds"]


def peak_bytes(memory: MemoryTables, device_of: IntArray, devices: int) -> IntArray:
    """Return the liveness peak of each device in bytes, shape (D,)."""
    change = np.empty(len(device_of) + 1, dtype=np.int64)
    peaks = [peak_on_device(memory, device_of, device, change) for device in range(devices)]
    return np.array(peaks, dtype=np.int64)


def evaluate(problem: Problem, assignment: Assignment, *, search_bounds: bool = True) -> Evaluation:
    """Return the latency, throughput, memory and transfers of `assignment`, with lower bounds.

    With replicas every round is simulated: memory is the maximum over rounds, loads and transfers
    are averages, and the latency is that of the first round.

    A published problem takes its latency, throughput and loads from its own cost model.

    Args:
        problem: the graph, the devices and the cost model.
        assignment: the placement.
        search_bounds: whether to search for the optimum of a small graph, for the lower bounds.
            That takes longer than all the rest; without it they are those of formulas.

    Raises:
        SpecError: if the assignment is for another graph or topology, or has replicas for a
            published problem.
        InfeasibleError: if a published problem's own rules forbid it.

    """
    evaluation = evaluate_unbounded(problem, assignment)
    return with_bounds(evaluation, problem, search_bounds=search_bounds)


def with_bounds(
    evaluation: Evaluation, problem: Problem, *, search_bounds: bool = True
) -> Evaluation:
    """Return `evaluation`, of `evaluate_unbounded`, with the lower bounds of its `problem`."""
    bounds = best_bounds(problem) if search_bounds else formula_bounds(problem)
    return replace(
        evaluation,
        load_bound_s=bounds.load_s if evaluation.rounds == 1 else load_bound_s(problem),
        lower_bound_s=bounds.latency_s if problem.workload is None else evaluation.lower_bound_s,
    )


def evaluate_unbounded(problem: Problem, assignment: Assignment) -> Evaluation:
    """Return what `evaluate` does, but with lower bounds of 0 s: they take most of its time."""
    # Compiled code does no bounds checks, so its input must be valid.
    assignment.check_for(problem.graph.n_ops, problem.topology.n_devices)
    costs, devices = problem.costs, problem.topology.n_devices
    log, device_of = schedule_log(costs), assignment.device_of
    latency, count = schedule(costs, device_of, log)
    transfers = _transfers(log, count)
    load = _load(costs, assignment, transfers, device_of)
    device_holding = holding(problem.memory, assignment, devices)
    evaluation = Evaluation(
        latency_s=float(latency),
        throughput_per_s=1.0 / load.busiest_s if load.busiest_s > 0 else float("inf"),
        critical_path_s=float(critical_path_s(costs, device_of)),
        load_bound_s=0.0,
        lower_bound_s=0.0,
        transfer_bytes=load.sent_bytes,
        partitions=assignment.n_partitions,
        rounds=assignment.rounds,
        replicas=assignment.replicas,
        devices=tuple(
            _device_use(problem, assignment, d, device_holding, load) for d in range(devices)
        ),
        op_start_s=log.start_s,
        op_finish_s=log.finish_s,
        transfers=transfers,
        memory=tuple(
            MemoryProfile(ops, log.start_s[ops], device_holding.weight_bytes[device] + live)
            for device, live in enumerate(device_holding.first_live_bytes)
            for ops in [np.flatnonzero(device_of == device).astype(np.int64)]
        ),
    )
    return _as_published(problem, assignment, evaluation) if problem.workload else evaluation


def _as_published(problem: Problem, assignment: Assignment, simulated: Evaluation) -> Evaluation:
    """Return the evaluation with the costs of a published problem's own model, bound included.

    If an accelerator may hold any number of pieces, its partitions are the pieces.
    """
    workload, device_of = problem.workload, assignment.device_of
    assert workload is not None
    if assignment.rounds > 1:
        raise SpecError("a published problem has no replicas; leave out devices.saturate_host")
    refuse_unfit(workload, device_of)
    loads = device_loads_s(workload, device_of)
    if workload.most_pieces is None:
        on_accelerator = device_of < workload.accelerators
        pieces = np.where(on_accelerator, assignment.partition_of, -1)
        latency_s = piece_latency(workload, pieces, assignment.n_partitions)
    else:
        latency_s = sample_latency_s(workload, device_of)
    busiest_s = float(loads.max())
    return replace(
        simulated,
        latency_s=latency_s,
        throughput_per_s=1.0 / busiest_s if busiest_s > 0 else float("inf"),
        lower_bound_s=sample_bound_s(workload),
        devices=tuple(
            replace(use, load_s=float(load))
            for use, load in zip(simulated.devices, loads, strict=True)
        ),
    )


@dataclass(frozen=True, eq=False, slots=True)
class _Load:
    """Load of one input on devices and links, averaged over rounds."""

    device_s: FloatArray
    """Shape (D,)."""
    received_bytes: IntArray
    """Shape (D,)."""
    sent_bytes: int
    busiest_s: float
    """The largest load of any device, link or host."""


def _load(
    costs: CostTables, assignment: Assignment, first: Transfers, device_of: IntArray
) -> _Load:
    """Return the load of an input; `first` and `device_of` belong to the first round."""
    devices, rounds = costs.op_time_s.shape[1], assignment.rounds
    device_s, link_s = np.zeros(devices), np.zeros(devices * devices)
    received = np.zeros(devices, dtype=np.int64)
    log = schedule_log(costs) if rounds > 1 else None
    for index in range(rounds):
        moves = first
        if log and index:
            device_of = assignment.device_of_round(index)
            moves = _transfers(log, schedule(costs, device_of, log)[1])
        np.add.at(device_s, device_of, costs.op_time_s[np.arange(len(device_of)), device_of])
        np.add.at(received, moves.target, costs.value_bytes[moves.value])
        np.add.at(link_s, moves.source * devices + moves.target, moves.finish_s - moves.start_s)
    # Each replica has its own process, whose host launches one input per round.
    busiest_s = max(float(device_s.max()), float(link_s.max()), float(costs.issue_s[-1]))
    # Averages of bytes are rounded to the nearest integer.
    per_input = (received + rounds // 2) // rounds
    sent = (int(received.sum()) + rounds // 2) // rounds
    return _Load(device_s / rounds, per_input, sent, busiest_s / rounds)


def _transfers(log: ScheduleLog, count: int) -> Transfers:
    sent, sent_s = log.sent[:count].copy(), log.sent_s[:count].copy()
    return Transfers(sent[:, 0], sent[:, 1], sent[:, 2], sent_s[:, 0], sent_s[:, 1])


def _device_use(
    problem: Problem, assignment: Assignment, device: int, device_holding: Holding, load: _Load
) -> DeviceUse:
    spec, partitions = problem.topology.devices[device], assignment.holds(device)
    on_device = np.isin(assignment.partition_of, partitions)
    state_bytes = _state_bytes(problem.graph, on_device)
    return DeviceUse(
        logical_id=device,
        name=spec.name,
        operators=int(on_device.sum()),
        partitions=tuple(partitions.tolist()),
        weight_bytes=int(device_holding.weight_bytes[device]) - state_bytes,
        state_bytes=state_bytes,
        peak_bytes=int(device_holding.peak_bytes[device]),
        static_bytes=int(device_holding.static_bytes[device]),
        memory_bytes=spec.memory_bytes,
        reserved_bytes=spec.reserved_bytes,
        load_s=float(load.device_s[device]),
        received_bytes=int(load.received_bytes[device]),
        cache_bytes=_cache_bytes(problem.graph, on_device),
    )


def _cache_bytes(graph: OpGraph, operators: npt.NDArray[np.bool_]) -> int:
    """Return the bytes of the caches used by `operators` (mask of shape (n,))."""
    read = np.unique(graph.reads[np.repeat(operators, np.diff(graph.read_start))])
    return int(graph.value_alloc_bytes[read[graph.value_is_cache[read]]].sum())


def _state_bytes(graph: OpGraph, operators: npt.NDArray[np.bool_]) -> int:
    """Return the optimizer state of the weights used by `operators` (mask of shape (n,))."""
    if not graph.weight_state_bytes.any():
        return 0
    used = graph.uses[np.repeat(operators, np.diff(graph.use_start))]
    return int(graph.weight_state_bytes[np.unique(used)].sum())
