"""What can carry a plan out as it is, beside our own execution of it."""

from dataclasses import dataclass

import numpy as np

from fxpart.core.assignment import Assignment
from fxpart.core.graph import OpGraph
from fxpart.errors import SpecError
from fxpart.plan_export.device_map import device_map
from fxpart.plan_export.split_points import forward_operators, split_points

__all__ = ["Carriers", "carriers"]


_FEW = 0.02
"""Share of the operators that may run elsewhere than planned: masks, positions, sums."""


@dataclass(frozen=True, slots=True)
class Carriers:
    """How far other tools can carry a plan out."""

    torn: tuple[str, ...]
    """Modules that accelerate cannot run as divided (`DeviceMap.torn`)."""
    elsewhere: int
    """Operators that accelerate would run on another device than planned."""
    operators: int
    """Of the graph; checks are none."""
    inside: str | None
    """Where a stage begins that is no module's begin or end; empty where the plan is no row of
    stages, None where torch's pipelines can cut it."""

    @property
    def accelerate(self) -> bool:
        """Return whether accelerate can run the plan by its device map, but for a few operators."""
        return not self.torn and self.elsewhere <= _FEW * self.operators

    @property
    def pipelining(self) -> bool:
        """Return whether torch's pipelines can run the plan by its split points."""
        return self.inside is None


def carriers(graph: OpGraph, assignment: Assignment) -> Carriers:
    """Return what can carry out a plan, which must have no replicas.

    Torch's pipelines run stages on devices in turn: one on each, or several in rounds.

    Raises:
        SpecError: for a plan with replicas.

    """
    mapped = device_map(graph, assignment)
    inside: str | None = None
    try:
        split_points(graph, assignment)
    except SpecError:
        inside = _first_begin_inside(graph, assignment)
    else:
        stages = np.unique(assignment.partition_of[forward_operators(graph)]).tolist()
        homes = [assignment.devices_of_partition[stage][0] for stage in stages]
        turns = list(dict.fromkeys(homes))
        if homes != [turns[stage % len(turns)] for stage in range(len(homes))]:
            inside = ""
    computing = int((~graph.is_check).sum())
    return Carriers(mapped.torn, len(mapped.moved), computing, inside)


def _first_begin_inside(graph: OpGraph, assignment: Assignment) -> str:
    """Return the module in which a stage begins; empty where partitions are no row of stages."""
    ops = forward_operators(graph)
    stage = assignment.partition_of[ops]
    if (np.diff(stage) < 0).any() or (np.diff(stage) > 1).any():
        return ""
    for index in (1 + np.flatnonzero(np.diff(stage))).tolist():
        before, after = graph.modules[ops[index - 1]], graph.modules[ops[index]]
        if before == after or before.startswith(f"{after}."):
            return after or "the model itself"
    return graph.modules[ops[-1]] or "the model itself"
