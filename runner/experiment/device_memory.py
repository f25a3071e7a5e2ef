"""Memory that each device needs besides the tensors of a plan, and whether it fits."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from fxpart.core.assignment import Assignment
from fxpart.core.reserve import Interval, Reserve
from fxpart.core.topology import DeviceSpec
from fxpart.cost.device_memory import DeviceMemory, device_memory_of
from fxpart.cost.evaluation import Evaluation
from fxpart.cost.problem import Problem
from fxpart.errors import InfeasibleError
from fxpart.schedule import ScheduleResult
from fxpart.sharding.main_gradients import kept_gradient_bytes
from runner.config.schema import Config
from runner.experiment.mesh import replica_count, shares_something
from runner.experiment.serving import is_serving
from runner.experiment.topology import reserve_of
from runner.experiment.training import is_megatron
from runner.output.units import GIB, size_unit

__all__ = [
    "device_memory",
    "device_memory_metrics",
    "device_memory_rows",
    "device_needs",
    "does_not_fit",
    "memory_line",
    "partners",
    "tightest",
    "with_less_memory",
]

_RING_PEERS = 2
"""Neighbours in a ring of replicas, or of tensor-parallel devices."""


def device_memory(
    config: Config,
    problem: Problem,
    assignment: Assignment,
    evaluation: Evaluation,
    schedule: ScheduleResult | None = None,
) -> tuple[DeviceMemory, ...]:
    """Return the memory needs of each computing device, in the order of logical ids.

    With a schedule, replicas or tensor parallelism, processes exchange tensors; otherwise a single
    process runs all devices.
    """
    peak_bytes = {use.logical_id: use.peak_bytes for use in evaluation.devices if use.partitions}
    if schedule:
        peak_bytes |= dict(zip(schedule.devices, schedule.peak_bytes, strict=True))
    peers = partners(config, evaluation, schedule)
    return device_needs(config, problem, assignment, peak_bytes, peers)


def device_needs(
    config: Config,
    problem: Problem,
    assignment: Assignment,
    held_bytes: Mapping[int, int],
    peers: Mapping[int, int],
) -> tuple[DeviceMemory, ...]:
    """Return `device_memory` for known bytes of tensors at the peak and known `partners`."""
    return device_memory_of(
        problem,
        assignment,
        _reserves(config, problem),
        tensor_bytes=held_bytes,
        peers=peers,
        kept_bytes=_kept_gradients(problem, assignment) if is_megatron(config) else {},
    )


def _kept_gradients(problem: Problem, assignment: Assignment) -> dict[int, int]:
    home = assignment.device_of
    return {
        device: kept_gradient_bytes(problem.graph, home, device)
        for device in range(problem.topology.n_devices)
    }


def partners(
    config: Config, evaluation: Evaluation, schedule: ScheduleResult | None = None
) -> dict[int, int]:
    """Return the number of communication peers of each device; empty within one process."""
    return _peers(config, evaluation) if schedule or _ranks(config) else {}


def _reserves(config: Config, problem: Problem) -> tuple[Reserve, ...]:
    """Return the reserve of each device; none for devices that are the host itself."""
    reserve = reserve_of(config.reserve)
    return tuple(Reserve() if spec.on_host else reserve for spec in problem.topology.devices)


def _peers(config: Config, evaluation: Evaluation) -> dict[int, int]:
    """Return the number of devices that each device exchanges tensors or gradients with."""
    moves = evaluation.transfers
    partners: dict[int, set[int]] = {use.logical_id: set() for use in evaluation.devices}
    for source, target in zip(moves.source.tolist(), moves.target.tolist(), strict=True):
        partners[source].add(target)
        partners[target].add(source)
    return {device: len(others) + _ranks(config) for device, others in partners.items()}


def _ranks(config: Config) -> int:
    """Return the number of each device's neighbours in the rings of its collectives."""
    # Replicas that serve separate texts exchange nothing, unless they share experts or sequences.
    exchanges = not is_serving(config) or shares_something(config)
    replicas = replica_count(config) if exchanges else 1
    return sum(min(_RING_PEERS, n - 1) for n in (replicas, config.tensor_parallel))


def with_less_memory(
    problem: Problem,
    evaluation: Evaluation,
    needs: Sequence[DeviceMemory],
    share: float = 1.0,
    *,
    in_proportion: bool,
    keeps_fitting: bool = False,
) -> Problem:
    """Return `problem` with less tensor memory on the kinds of device that a plan overfills.

    The new limit is the plan's peak in `evaluation`, less a `share` of the bytes that lack room.
    All devices of a kind, of equal name and size, get the lowest such limit, since the next plan
    may fill another of them.

    Args:
        problem: the problem, with the limits of that plan.
        evaluation: the cost of the plan.
        needs: what each device needs in the plan.
        share: share of the missing bytes, above 0 and at most 1.
        in_proportion: whether the missing bytes are of more tensors than those of `evaluation`, as
            with a schedule or a prefill; the limit is then lowered in the same proportion.
        keeps_fitting: whether devices with enough room keep their peaks of this plan at least.

    """
    devices = problem.topology.devices
    kinds = [(spec.name, spec.total_bytes) for spec in devices]
    limits: dict[tuple[str, int], int] = {}
    peak_with_room_bytes = [0] * len(devices)
    for need in needs:
        if need.device >= len(devices):  # the host, whose memory is accounted for separately
            continue
        missing_bytes: float = need.needed.expected - need.total_bytes
        spec, use = devices[need.device], evaluation.devices[need.device]
        planned_bytes = min(spec.memory_bytes, use.peak_bytes)
        if missing_bytes <= 0:
            peak_with_room_bytes[need.device] = planned_bytes if keeps_fitting else 0
            continue
        if in_proportion:
            missing_bytes *= planned_bytes / max(1, need.parts["tensors"].expected)
        limit_bytes = max(1, int(planned_bytes - share * missing_bytes))
        kind = kinds[need.device]
        limits[kind] = min(limit_bytes, limits.get(kind, limit_bytes))
    limited = tuple(
        _limited(spec, max(peak_bytes, limits.get(kind, spec.memory_bytes)))
        for spec, kind, peak_bytes in zip(devices, kinds, peak_with_room_bytes, strict=True)
    )
    return replace(problem, topology=replace(problem.topology, devices=limited))


def _limited(spec: DeviceSpec, most_bytes: int) -> DeviceSpec:
    """Return `spec` with at most `most_bytes` for tensors; the rest is reserved."""
    kept_bytes = min(spec.memory_bytes, most_bytes)
    return replace(spec, memory_bytes=kept_bytes, reserved_bytes=spec.total_bytes - kept_bytes)


def does_not_fit(needs: Sequence[DeviceMemory], *, is_only: bool = False) -> InfeasibleError:
    """Return the error for a plan whose tensors fit, but not with the memory besides them.

    `is_only` tells that its mode knows no other plan.
    """
    need = tightest(needs)
    unit = size_unit(need.total_bytes)
    needed, total = unit.show_unequal(need.needed.expected, need.total_bytes)
    which = "this plan" if is_only else "the best plan found"
    return InfeasibleError(
        f"device {need.device} needs {needed} {unit.name} for {which}, it has {total}"
        f"{_parts_text(need)}; {_decides(need.decided_by)}; take larger"
        " or more devices, a smaller batch, or reserve=none to count tensors alone",
        needed_bytes=need.needed.expected,
        available_bytes=need.total_bytes,
    )


def _decides(part: str) -> str:
    """Return a sentence on the part of the memory that decides a verdict."""
    return f"{part} {'decide' if part.endswith('s') else 'decides'}"


def tightest(needs: Sequence[DeviceMemory]) -> DeviceMemory:
    """Return the device that is fullest relative to its memory."""
    return max(needs, key=lambda need: need.needed.high / need.total_bytes)


def memory_line(needs: Sequence[DeviceMemory]) -> str:
    """Return a line on the tightest device: its verdict, its need and the parts of that."""
    need = tightest(needs)
    unit = size_unit(need.total_bytes)
    needed, advice = need.needed, ""
    low, expected, high = map(unit.show, (needed.low, needed.expected, needed.high))
    if need.verdict == "tight":  # it lacks memory only for the upper limit
        high, total = unit.show_unequal(needed.high, need.total_bytes)
        advice = "; reserve.upper_limits=true leaves room for the upper limit"
    else:
        expected, total = unit.show_unequal(needed.expected, need.total_bytes)
    limits = f" ({low} to {high})" if low != high else ""
    decisive = f", {_decides(need.decided_by)}" if need.decided_by else ""
    return (
        f"{need.verdict}{decisive}: device {need.device} needs {expected}{limits} of {total}"
        f" {unit.name}{_parts_text(need)}{advice}"
    )


def _parts_text(need: DeviceMemory) -> str:
    """Return the sizes of the parts as text, without those that round to zero in the unit."""
    unit = size_unit(need.total_bytes)
    parts = ", ".join(
        f"{part} {unit.show(size.expected)}"
        for part, size in need.parts.items()
        if float(unit.show(size.expected))
    )
    return f": {parts}" if parts else ""


def device_memory_metrics(needs: Sequence[DeviceMemory]) -> dict[str, float]:
    """Return the metrics of the device with the largest need; none for a published problem."""
    if not needs:
        return {}
    needed = max((need.needed for need in needs), key=lambda needed: needed.expected)
    return {
        "device_memory_gib": needed.expected / GIB,
        "device_memory_gib_low": needed.low / GIB,
        "device_memory_gib_high": needed.high / GIB,
        "memory_is_tight": float(any(need.verdict != "fits" for need in needs)),
    }


def device_memory_rows(needs: Sequence[DeviceMemory]) -> list[dict[str, object]]:
    """Return the needs of each device as plain values, sizes as low, expected and high bytes."""
    return [
        {
            "device": need.device,
            "verdict": need.verdict,
            "decided_by": need.decided_by,
            "total_bytes": need.total_bytes,
            "needed_bytes": _values(need.needed),
            "parts_bytes": {part: _values(size) for part, size in need.parts.items()},
        }
        for need in needs
    ]


def _values(size: Interval) -> list[int]:
    return [size.low, size.expected, size.high]
