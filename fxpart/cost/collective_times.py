"""Collectives of a captured graph: which operators they are, their bytes, and their times."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from fxpart.core.graph import FloatArray, IntArray, OpGraph
from fxpart.core.topology import Link, Topology
from fxpart.cost.collectives import COLLECTIVES, CollectiveCurves, collective_time_s
from fxpart.cost.tables import LatencySource

__all__ = [
    "CollectiveGroup",
    "TimesWithCollectives",
    "collective_bytes",
    "collective_kinds",
    "expert_weights",
]

_OURS = "fxpart."


def collective_kinds(graph: OpGraph) -> dict[int, str]:
    """Return the kind of each operator of `graph` that is a collective, one of `COLLECTIVES`."""
    kinds = {}
    for op, target in enumerate(graph.targets):
        kind = target.removeprefix(_OURS).partition(".")[0]
        if target.startswith(_OURS) and kind in COLLECTIVES:
            kinds[op] = kind
    return kinds


def collective_bytes(graph: OpGraph) -> dict[int, int]:
    """Return the bytes of the whole tensor of each collective, as `collective_time_s` takes it.

    That is what it makes; of a reduce-scatter, which makes a part of it, what it reads first; of an
    exchange the larger of the two.
    """
    made: IntArray = np.zeros(graph.n_ops, dtype=np.int64)
    is_made = graph.value_producer >= 0
    np.add.at(made, graph.value_producer[is_made], graph.value_bytes[is_made])
    sizes = {}
    for op, kind in collective_kinds(graph).items():
        read = int(graph.value_bytes[graph.reads_of(op)[0]])
        both = {"reduce_scatter": read, "all_to_all": max(read, int(made[op]))}
        sizes[op] = both.get(kind, int(made[op]))
    return sizes


def expert_weights(graph: OpGraph) -> IntArray:
    """Return the weights of the modules that exchange tokens: of experts that devices share."""
    homes = {
        f"{graph.modules[op]}."
        for op, kind in collective_kinds(graph).items()
        if kind == "all_to_all"
    }
    names = enumerate(graph.weight_names)
    return np.array([w for w, name in names if name.startswith(tuple(homes))], dtype=np.int64)


def _axis(target: str) -> str:
    """Return the axis of the mesh that a collective goes along."""
    if target.startswith(f"{_OURS}all_to_all"):
        return "expert"
    return "context" if target.endswith(".context") else "tensor"


@dataclass(frozen=True, eq=False, slots=True)
class CollectiveGroup:
    """Devices that exchange values along one axis of the mesh."""

    size: int
    links: tuple[Link, ...]
    """The slowest of each device's group."""
    curves: CollectiveCurves | None = None
    """What a library makes of these links, as of `collective_time_s`."""


@dataclass(frozen=True, eq=False, slots=True)
class TimesWithCollectives:
    """Times of operators, of which some are collectives of each device's group."""

    others: LatencySource
    """Of what is no collective."""
    groups: Mapping[str, CollectiveGroup]
    """By axis, ``tensor``, ``expert`` and ``context``; a device of the topology stands for one of
    each."""

    def op_time_s(self, graph: OpGraph, topology: Topology) -> FloatArray:
        """Return the time of each operator on each device in seconds, shape (n, D)."""
        times = self.others.op_time_s(graph, topology).copy()
        kinds = collective_kinds(graph)
        for op, size_bytes in collective_bytes(graph).items():
            group = self.groups[_axis(graph.targets[op])]
            for device, link in enumerate(group.links[: topology.n_devices]):
                times[op, device] = collective_time_s(
                    kinds[op], size_bytes, group.size, link, group.curves
                )
        return times
