"""`Problem`: one model on one topology, with the cost tables that modes need."""

from dataclasses import dataclass

from fxpart.core.graph import OpGraph
from fxpart.core.topology import Topology
from fxpart.core.workload import Workload
from fxpart.cost.tables import CostTables, LatencySource, MemoryTables, cost_tables, memory_tables
from fxpart.errors import SpecError, nearest_names

__all__ = ["BY_TIME", "OBJECTIVES", "Problem", "make_problem"]

OBJECTIVES = ("latency", "throughput", "memory", "energy")
"""Objectives to minimize: the latency of one input, the largest load of any device or link, the
memory of the fullest device, or the energy of one input (`fxpart.cost.energy`)."""
BY_TIME = OBJECTIVES[:2]
"""Objectives in seconds, the only ones of published problems."""


@dataclass(frozen=True, eq=False, slots=True)
class Problem:
    """A model and a topology. The tables repeat both in a layout for inner loops."""

    graph: OpGraph
    topology: Topology
    costs: CostTables
    memory: MemoryTables
    objective: str = "latency"
    """One of `OBJECTIVES`."""
    workload: Workload | None = None
    """The published problem, if any, whose own cost model applies (`fxpart.cost.blocking`)."""


def make_problem(
    graph: OpGraph,
    topology: Topology,
    latency: LatencySource,
    objective: str = "latency",
) -> Problem:
    """Return the problem of placing `graph` on `topology`.

    `latency` gives the times of operators: a `LatencyModel` (roofline), an `OperatorProfile`
    (measured), a `Calibration` (roofline fitted to a profile), or a `Workload`, whose cost model
    then applies too. `objective` is one of `OBJECTIVES`.

    Raises:
        SpecError: if the objective does not exist or does not apply to a published problem, or it
            is energy and the power of a device is unknown.

    """
    if not isinstance(graph, OpGraph):
        raise SpecError(
            f"a problem has an OpGraph, got {type(graph).__name__}; pass the graph of a capture,"
            " such as capture(model, inputs).graph"
        )
    if objective not in OBJECTIVES:
        raise SpecError(
            f"objective={objective} does not exist; {nearest_names(objective, OBJECTIVES)}"
        )
    if objective not in BY_TIME and isinstance(latency, Workload):
        raise SpecError(
            f"objective={objective} applies to models; a published problem has latency and "
            "throughput"
        )
    unrated = dict.fromkeys(device.name for device in topology.devices if not device.power_w)
    if objective == "energy" and unrated:
        raise SpecError(
            f"objective=energy needs the power of each device, {', '.join(unrated)} has none: add"
            " power_w: 300 to its file in conf/accelerator/"
        )
    memory = memory_tables(graph)
    costs = cost_tables(graph, memory, topology, latency)
    workload = latency if isinstance(latency, Workload) else None
    return Problem(graph, topology, costs, memory, objective, workload)
