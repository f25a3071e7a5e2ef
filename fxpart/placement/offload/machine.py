"""`Machine`: a model, its devices and the tiers outside them, before any decision."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from fxpart.core.graph import FloatArray, IntArray, OpGraph
from fxpart.core.tiers import OffloadOptions, Tiers
from fxpart.core.topology import Topology
from fxpart.cost.problem import Problem
from fxpart.cost.tables import cost_tables
from fxpart.placement.offload.units import HOSTED, STREAMED, Unit, units_of

__all__ = ["BoolArray", "HostTimes", "Machine", "with_less"]

_PART = 6
"""Units larger than this fraction (1 / n) of a device are divided."""
_SMALL = 1e-3
"""Units below this share of all units' weights are offloaded last."""

BoolArray = npt.NDArray[np.bool_]
HostTimes = Callable[[OpGraph, Topology], FloatArray]
"""Times of operators on a topology that has the host as its last device, shape (n, D + 1)."""


# Without slots, for the cached properties.
@dataclass(frozen=True, eq=False)
class Machine:
    """The environment of offloading: where modules may be stored, copied and run."""

    problem: Problem
    """The model on the devices only."""
    tiers: Tiers
    options: OffloadOptions
    link: tuple[float, float]
    """Bytes per second and latency in seconds of the link between the host and each device."""
    host_times: HostTimes | None
    """None if the host does not compute."""
    first: Problem | None = None
    """`problem` before its device memory was reduced, for use by bounds; None if it is the same."""
    cached: BoolArray | None = None
    """Units with an offloaded cache; None for none."""
    begins: bool = False
    """Whether the caches are still empty, so that they are not copied to a device."""
    known_units: tuple[Unit, ...] | None = None
    """The units of the model if known; None to compute them."""

    @property
    def computes(self) -> bool:
        """Whether modules may run on the host."""
        has_processor = self.tiers.host.processor is not None
        return self.options.on_host and has_processor and self.host_times is not None

    @cached_property
    def units(self) -> tuple[Unit, ...]:
        """The units that may be offloaded, in graph order."""
        if self.known_units is not None:
            return self.known_units
        smallest_bytes = int(self.problem.topology.memory_bytes.min())
        return units_of(self.problem.graph, smallest_bytes // _PART)

    @cached_property
    def with_host(self) -> Problem:
        """The model on the devices and the host."""
        topology, graph = self.problem.topology, self.problem.graph
        host = self.tiers.host.processor
        if host is None or self.host_times is None:
            return self.problem
        rate, latency = self.link
        wider = Topology(
            (*topology.devices, host),
            np.pad(topology.bytes_per_s, ((0, 1), (0, 1)), constant_values=rate),
            np.pad(topology.latency_s, ((0, 1), (0, 1)), constant_values=latency),
            topology.host_launch_s,
        )
        np.fill_diagonal(wider.bytes_per_s, np.inf)
        np.fill_diagonal(wider.latency_s, 0.0)
        times = _Times(self.host_times)
        costs = cost_tables(graph, self.problem.memory, wider, times)
        return replace(self.problem, topology=wider, costs=costs)

    @cached_property
    def sizes(self) -> IntArray:
        """Bytes of each unit's weights."""
        return np.array([unit.weight_bytes for unit in self.units], dtype=np.int64)

    @cached_property
    def cache_sizes(self) -> IntArray:
        """Bytes of each unit's offloaded cache, if the unit runs on a device."""
        if self.cached is None:
            return np.zeros(len(self.units), dtype=np.int64)
        sizes = np.array([unit.cache_bytes for unit in self.units], dtype=np.int64)
        return np.where(self.cached, sizes, 0)

    def tier_sizes(self, ways: IntArray) -> IntArray:
        """Return the bytes of each unit that are copied to devices."""
        weights = np.where(ways == STREAMED, self.sizes, 0)
        return weights + np.where(ways == HOSTED, 0, self.cache_sizes)

    def tier_caches(self, ways: IntArray) -> IntArray:
        """Return the offloaded caches, which are copied to devices."""
        units = np.flatnonzero((ways != HOSTED) & (self.cache_sizes > 0)).tolist()
        return np.array([v for unit in units for v in self.units[unit].caches], dtype=np.int64)

    @property
    def is_small(self) -> BoolArray:
        """Whether a unit frees so little that it is offloaded last, such as a norm."""
        small: BoolArray = self.sizes < _SMALL * self.sizes.sum()
        return small

    @cached_property
    def device_s(self) -> FloatArray:
        """Time of each unit on the fastest device."""
        times = self.problem.costs.op_time_s.min(axis=1)
        return np.array([float(times[unit.ops].sum()) for unit in self.units])

    @cached_property
    def host_s(self) -> FloatArray:
        """Time of each unit on the host; infinite if the host does not compute."""
        if not self.computes:
            return np.full(len(self.units), np.inf)
        times = self.with_host.costs.op_time_s[:, -1]
        return np.array([float(times[unit.ops].sum()) for unit in self.units])

    @property
    def copied_bytes_per_s(self) -> float:
        """Rate of an uncontended copy from the host."""
        share = self.options.pinned_share if self.options.overlap else self.options.pageable_share
        return self.link[0] * share

    @cached_property
    def copy_s(self) -> FloatArray:
        """Time to copy each unit's weights from the host."""
        return self.sizes / self.copied_bytes_per_s


@dataclass(frozen=True, slots=True)
class _Times:
    """Adapter from a function to a `LatencySource`."""

    function: Callable[[OpGraph, Topology], FloatArray]

    def op_time_s(self, graph: OpGraph, topology: Topology) -> FloatArray:
        """Return the time of each operator on each device in seconds, shape (n, D)."""
        return self.function(graph, topology)


def with_less(topology: Topology, room: int) -> Topology:
    """Return the topology with `room` fewer bytes for tensors on each device."""
    specs = tuple(
        replace(
            spec,
            memory_bytes=max(1, spec.memory_bytes - room),
            reserved_bytes=spec.total_bytes - max(1, spec.memory_bytes - room),
        )
        for spec in topology.devices
    )
    return replace(topology, devices=specs)
