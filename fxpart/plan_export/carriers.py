"""Determine which other tools can run a plan as it is."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from fxpart.core.assignment import Assignment
from fxpart.core.graph import ENCODER_STATES, OpGraph
from fxpart.errors import SpecError
from fxpart.plan_export.device_map import DeviceMap, device_map
from fxpart.plan_export.split_points import forward_operators, split_points

__all__ = ["Carriers", "carriers", "map_carriers"]


_FEW = 0.02
"""Largest share of operators that may run on other devices than planned: masks, positions, sums."""


@dataclass(frozen=True, slots=True)
class Carriers:
    """How well other tools can run a plan."""

    torn: tuple[str, ...]
    """Modules that accelerate cannot run as split (`DeviceMap.torn`)."""
    elsewhere: int
    """Operators that accelerate would run on another device than planned."""
    operators: int
    """Number of operators of the graph, without checks."""
    inside: str | None
    """The module inside which a stage begins; empty if the plan is not a sequence of stages or has
    tiers, None if torch's pipelines can split it."""
    has_all: bool = True
    """Whether the map has all modules: that of a decode has no encoder, unless it has one entry for
    the whole model."""

    @property
    def accelerate(self) -> bool:
        """Whether accelerate can run the plan by its device map, except for a few operators."""
        few_elsewhere = self.elsewhere <= _FEW * self.operators
        return self.has_all and not self.torn and few_elsewhere

    @property
    def pipelining(self) -> bool:
        """Whether torch's pipelines can run the plan by its split points."""
        return self.inside is None


def carriers(graph: OpGraph, assignment: Assignment, hosts: Sequence[int] = ()) -> Carriers:
    """Determine which tools can run a plan without replicas; `hosts` are the devices that are CPUs.

    Torch's pipelines assign stages to devices round-robin, one or several on each.

    Raises:
        SpecError: if the plan has replicas.

    """
    mapped = device_map(graph, assignment, hosts=hosts)
    inside: str | None = None
    try:
        split_points(graph, assignment)
    except SpecError:
        inside = _first_begin_inside(graph, assignment)
    else:
        stages = np.unique(assignment.partition_of[forward_operators(graph)]).tolist()
        homes = [assignment.devices_of_partition[stage][0] for stage in stages]
        cycle = list(dict.fromkeys(homes))
        if homes != [cycle[stage % len(cycle)] for stage in range(len(homes))]:
            inside = ""
    return replace(map_carriers(graph, mapped), inside=inside)


def map_carriers(graph: OpGraph, mapped: DeviceMap) -> Carriers:
    """Determine whether accelerate can run a plan by its map, leaving out pipelines."""
    computing = int((~graph.is_check).sum())
    has_all = "" in mapped.entries or ENCODER_STATES not in graph.value_names
    return Carriers(mapped.torn, len(mapped.moved), computing, "", has_all)


def _first_begin_inside(graph: OpGraph, assignment: Assignment) -> str:
    """Return the module inside which a stage begins; empty if partitions are not sequential."""
    ops = forward_operators(graph)
    stage = assignment.partition_of[ops]
    if (np.diff(stage) < 0).any() or (np.diff(stage) > 1).any():
        return ""
    for index in (1 + np.flatnonzero(np.diff(stage))).tolist():
        before, after = graph.modules[ops[index - 1]], graph.modules[ops[index]]
        if before == after or before.startswith(f"{after}."):
            return after or "the model itself"
    return graph.modules[ops[-1]] or "the model itself"
