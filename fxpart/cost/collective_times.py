"""Collectives of a captured graph: their operators, bytes and times."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType

import numpy as np

from fxpart.core.graph import MOST_KEPT_GRAPHS, FloatArray, IntArray, OpGraph
from fxpart.core.topology import Link, Topology
from fxpart.cost.collectives import COLLECTIVES, CollectiveCurves, collective_time_s
from fxpart.cost.tables import LatencySource

__all__ = [
    "CollectiveGroup",
    "TimesWithCollectives",
    "collective_axis",
    "collective_bytes",
    "collective_kinds",
    "collective_seconds",
    "expert_weights",
]

_OURS = "fxpart."


@lru_cache(maxsize=MOST_KEPT_GRAPHS)
def collective_kinds(graph: OpGraph) -> Mapping[int, str]:
    """Return the kind (one of `COLLECTIVES`) of each collective operator of `graph`."""
    named = {
        target: target.removeprefix(_OURS).partition(".")[0]
        for target in set(graph.targets)
        if target.startswith(_OURS)
    }
    kinds = {target: kind for target, kind in named.items() if kind in COLLECTIVES}
    ops = enumerate(graph.targets) if kinds else ()
    return MappingProxyType({op: kinds[target] for op, target in ops if target in kinds})


def collective_bytes(graph: OpGraph) -> dict[int, int]:
    """Return the bytes of the whole tensor of each collective, as for `collective_time_s`.

    This is the size of the result; for a reduce-scatter, whose result is a shard, that of its first
    operand; for an all-to-all the larger of the two.
    """
    produced_bytes: IntArray = np.zeros(graph.n_ops, dtype=np.int64)
    is_produced = graph.value_producer >= 0
    np.add.at(produced_bytes, graph.value_producer[is_produced], graph.value_bytes[is_produced])
    sizes = {}
    for op, kind in collective_kinds(graph).items():
        read = int(graph.value_bytes[graph.reads_of(op)[0]])
        input_sizes = {"reduce_scatter": read, "all_to_all": max(read, int(produced_bytes[op]))}
        sizes[op] = input_sizes.get(kind, int(produced_bytes[op]))
    return sizes


def expert_weights(graph: OpGraph) -> IntArray:
    """Return the weights of the modules that exchange tokens, which are sharded experts."""
    prefixes = {
        f"{graph.modules[op]}."
        for op, kind in collective_kinds(graph).items()
        if kind == "all_to_all"
    }
    names = enumerate(graph.weight_names)
    return np.array([w for w, name in names if name.startswith(tuple(prefixes))], dtype=np.int64)


def collective_axis(target: str) -> str:
    """Return the mesh axis of a collective."""
    if target.startswith(f"{_OURS}all_to_all"):
        return "expert"
    return "context" if target.endswith(".context") else "tensor"


@dataclass(frozen=True, eq=False, slots=True)
class CollectiveGroup:
    """Devices that communicate along one mesh axis."""

    size: int
    links: tuple[Link, ...]
    """The slowest link of each device's group."""
    curves: CollectiveCurves | None = None
    """Measured curves for these links, as for `collective_time_s`."""


@dataclass(frozen=True, eq=False, slots=True)
class TimesWithCollectives:
    """Operator times of graphs with collectives of each device's group."""

    others: LatencySource
    """Source of the times of all other operators."""
    groups: Mapping[str, CollectiveGroup]
    """Groups by axis: ``tensor``, ``expert`` and ``context``; each device of the topology
    represents one group per axis."""

    def op_time_s(self, graph: OpGraph, topology: Topology) -> FloatArray:
        """Return the time of each operator on each device in seconds, shape (n, D)."""
        times = self.others.op_time_s(graph, topology).copy()
        for op, seconds in collective_seconds(graph, self.groups).items():
            known = seconds[: topology.n_devices]
            times[op, : len(known)] = known
        return times


def collective_seconds(
    graph: OpGraph, groups: Mapping[str, CollectiveGroup]
) -> dict[int, list[float]]:
    """Return the time of each collective in the group of each device, in seconds.

    `groups` are those of `TimesWithCollectives`.
    """
    kinds = collective_kinds(graph)
    times: dict[int, list[float]] = {}
    seconds_of_call: dict[tuple[str, str, int], list[float]] = {}  # blocks repeat the same calls
    for op, size_bytes in collective_bytes(graph).items():
        kind, axis = kinds[op], collective_axis(graph.targets[op])
        call = kind, axis, size_bytes
        if call not in seconds_of_call:
            group = groups[axis]
            seconds_of_call[call] = [
                collective_time_s(kind, size_bytes, group.size, link, group.curves)
                for link in group.links
            ]
        times[op] = seconds_of_call[call]
    return times
