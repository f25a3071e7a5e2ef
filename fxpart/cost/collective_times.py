"""Collectives of a captured graph: which operators they are, their bytes, and their times."""

from dataclasses import dataclass

import numpy as np

from fxpart.core.graph import FloatArray, IntArray, OpGraph
from fxpart.core.topology import Link, Topology
from fxpart.cost.collectives import COLLECTIVES, CollectiveCurves, collective_time_s
from fxpart.cost.tables import LatencySource

__all__ = ["TimesWithCollectives", "collective_bytes", "collective_kinds"]

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

    That is what it makes; of a reduce-scatter, which makes a part of it, what it reads first.
    """
    made: IntArray = np.zeros(graph.n_ops, dtype=np.int64)
    is_made = graph.value_producer >= 0
    np.add.at(made, graph.value_producer[is_made], graph.value_bytes[is_made])
    return {
        op: int(made[op] if kind != "reduce_scatter" else graph.value_bytes[graph.reads_of(op)[0]])
        for op, kind in collective_kinds(graph).items()
    }


@dataclass(frozen=True, eq=False, slots=True)
class TimesWithCollectives:
    """Times of operators, of which some are collectives of each device's group."""

    others: LatencySource
    """Of what is no collective."""
    size: int
    """Devices of a group."""
    links: tuple[Link, ...]
    """The slowest link of each group, of which the topology has one device each."""
    curves: CollectiveCurves | None = None
    """What a library makes of these links, as of `collective_time_s`."""

    def op_time_s(self, graph: OpGraph, topology: Topology) -> FloatArray:
        """Return the time of each operator on each device in seconds, shape (n, D)."""
        times = self.others.op_time_s(graph, topology).copy()
        kinds = collective_kinds(graph)
        for op, size_bytes in collective_bytes(graph).items():
            for device, link in enumerate(self.links[: topology.n_devices]):
                times[op, device] = collective_time_s(
                    kinds[op], size_bytes, self.size, link, self.curves
                )
        return times
