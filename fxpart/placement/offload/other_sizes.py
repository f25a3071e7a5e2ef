"""Apply an offloading plan at other sizes, and to other steps of the same model.

Offloaded tensors stay in their tier. For prompts, a module that runs on the host for single tokens
may be streamed to a device instead, which is faster for many tokens.
"""

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from fxpart.core.assignment import Assignment
from fxpart.core.graph import IntArray
from fxpart.core.partitions import partition_by_device
from fxpart.core.tiers import Tiers
from fxpart.cost.holding import holding
from fxpart.cost.kernels import schedule, schedule_log
from fxpart.cost.problem import Problem
from fxpart.cost.streams import buffer_bytes, run_copies
from fxpart.errors import InfeasibleError
from fxpart.placement.offload.copies import Costed, costed
from fxpart.placement.offload.machine import BoolArray, Machine
from fxpart.placement.offload.plan import Offloaded, least_on_devices
from fxpart.placement.offload.searched_problem import hosted_ops, most_buffer
from fxpart.placement.offload.units import HOSTED, RESIDENT, STREAMED, Unit
from fxpart.placement.search.refine import latency_of

__all__ = ["PlacedStep", "TieredPlan", "most_offloaded"]


# Without slots, for the cached properties.
@dataclass(frozen=True, eq=False)
class PlacedStep:
    """One serving step on a placement."""

    problem: Problem
    """The problem, in which offloaded tensors take no memory."""
    assignment: Assignment
    copies: Costed | None = None
    """The copies during the step, if any."""
    tiers_hold: bool = True
    """Whether offloaded tensors fit in the tiers."""

    @cached_property
    def held_bytes(self) -> IntArray:
        """Peak bytes on each device, including copy buffers, shape (D,)."""
        devices = self.problem.topology.n_devices
        peaks = holding(self.problem.memory, self.assignment, devices).peak_bytes
        if self.copies is None:
            return peaks
        overlap = self.copies.streams.overlap
        return peaks + buffer_bytes(self.copies.copies, devices, overlap=overlap)

    @property
    def room_share(self) -> float:
        """The share of the fullest device's memory that tensors take.

        It is above 1 if they do not fit, and infinite if offloaded ones do not fit in the tiers.
        """
        room = np.maximum(self.problem.topology.memory_bytes, 1)
        return float((self.held_bytes / room).max()) if self.tiers_hold else float("inf")

    @cached_property
    def latency_s(self) -> float:
        """Latency of the step."""
        device_of = self.assignment.device_of
        if self.copies is None:
            return latency_of(self.problem, device_of)
        costs = self.copies
        timed, run = run_copies(
            self.problem.costs, device_of, costs.copies, costs.streams, costs.pushes
        )
        latency_s, _ = schedule(timed, device_of, schedule_log(timed))
        return max(float(latency_s), run.pushed_s)


class _Ways(NamedTuple):
    """The state of each unit of one graph."""

    units: tuple[Unit, ...]
    ways: IntArray
    on_disk: BoolArray
    cached: BoolArray


@dataclass(frozen=True, eq=False, slots=True)
class TieredPlan:
    """The offloaded parts of a model, for graphs of all its steps and sizes."""

    machine: Machine
    """The machine of the plan."""
    ways: IntArray
    on_disk: BoolArray
    _known: dict[tuple[str, ...], _Ways] = field(default_factory=dict)
    """Cached states by the names of a graph's operators."""

    @classmethod
    def of(cls, offloaded: Offloaded) -> "TieredPlan":
        """Return the tiered plan of `offloaded`."""
        assert offloaded.machine is not None
        return cls(offloaded.machine, offloaded.ways, offloaded.on_disk)

    def placed(self, problem: Problem, assignment: Assignment) -> PlacedStep:
        """Return a step of `problem`, placed by `assignment` on its devices and the host."""
        return self._step(problem, assignment.device_of, self._ways(problem))

    def prompts(self, problem: Problem, assignment: Assignment) -> tuple[PlacedStep, ...]:
        """Return the alternatives for a prefill, as of `placed`.

        The last alternative keeps hosted modules on the host. If streaming is allowed, the first
        one streams those that take longer on the host than to copy.
        """
        ways = self._ways(problem)
        steps = []
        machine = self._machine(problem, ways, begins=True)
        is_slow = machine.host_s - machine.device_s > machine.copy_s
        moved = (ways.ways == HOSTED) & is_slow
        if machine.options.stream and moved.any():
            copied = ways._replace(
                ways=np.where(moved, STREAMED, ways.ways), cached=ways.cached | moved
            )
            device_of = _nearest_devices(
                assignment.device_of, hosted_ops(machine, np.where(moved, HOSTED, RESIDENT))
            )
            steps.append(self._step(problem, device_of, copied, begins=True))
        return (*steps, self._step(problem, assignment.device_of, ways, begins=True))

    def _step(
        self, problem: Problem, device_of: IntArray, ways: _Ways, *, begins: bool = False
    ) -> PlacedStep:
        machine = self._machine(problem, ways, begins=begins)
        costs = costed(machine, ways.ways, ways.on_disk, device_of)
        sizes = machine.tier_sizes(ways.ways)
        passing = most_buffer(machine, ways.ways) if ways.on_disk.any() else 0
        host_bytes = int(sizes[~ways.on_disk].sum()) + passing
        assignment = partition_by_device(costs.problem.graph, device_of)
        step = PlacedStep(costs.problem, assignment, costs)
        hosted_bytes = int(step.held_bytes[machine.problem.topology.n_devices :].sum())
        fits_tiers = _hold(machine.tiers, hosted_bytes + host_bytes, int(sizes[ways.on_disk].sum()))
        return replace(step, tiers_hold=fits_tiers)

    def _machine(self, problem: Problem, ways: _Ways, *, begins: bool) -> Machine:
        alloc_bytes = problem.graph.value_alloc_bytes
        units = tuple(
            replace(unit, cache_bytes=int(alloc_bytes[unit.caches].sum())) for unit in ways.units
        )
        return replace(
            self.machine,
            problem=problem,
            first=None,
            cached=ways.cached,
            begins=begins,
            known_units=units,
        )

    def _ways(self, problem: Problem) -> _Ways:
        """Return the state of the units of a graph, matched by the names of their weights."""
        names = problem.graph.names
        if names not in self._known:
            planned = self.machine
            of_weight = {
                planned.problem.graph.weight_names[weight]: number
                for number, unit in enumerate(planned.units)
                for weight in unit.weights.tolist()
            }
            machine = planned
            if problem is not planned.problem:
                # Use the devices for which the units of the plan were divided.
                divided = replace(problem, topology=planned.problem.topology)
                machine = replace(planned, problem=divided, known_units=None)
            weight_names = problem.graph.weight_names
            same = [of_weight.get(weight_names[int(u.weights[0])], -1) for u in machine.units]
            numbers = np.array(same, dtype=np.int64)
            is_known, cached = numbers >= 0, planned.cached
            self._known[names] = _Ways(
                machine.units,
                np.where(is_known, self.ways[numbers], RESIDENT),
                is_known & self.on_disk[numbers],
                is_known & (cached[numbers] if cached is not None else False),
            )
        return self._known[names]


def _hold(tiers: Tiers, host_bytes: int, disk_bytes: int) -> bool:
    disk = tiers.disk.memory_bytes if tiers.disk else 0
    return host_bytes <= tiers.host.memory_bytes and disk_bytes <= disk


def _nearest_devices(device_of: IntArray, moved: BoolArray) -> IntArray:
    """Return the placement with `moved` operators on the device of the last one on a device."""
    host = int(device_of[moved].max())
    homes, before = device_of.copy(), 0
    on_devices = device_of[device_of < host]
    if len(on_devices):
        before = int(on_devices[0])
    for op in range(len(homes)):
        if moved[op]:
            homes[op] = before
        elif homes[op] < host:
            before = int(homes[op])
    return homes


def most_offloaded(machine: Machine) -> tuple[TieredPlan, PlacedStep] | None:
    """Return the plan with everything offloaded that can be, or None if it does not fit either."""
    try:
        least = least_on_devices(machine)
    except InfeasibleError:
        return None
    plan = TieredPlan(least.machine, least.ways, least.on_disk)
    assignment = partition_by_device(machine.problem.graph, least.device_of)
    return plan, plan.placed(machine.problem, assignment)
