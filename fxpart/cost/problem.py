"""`Problem`: one model on one topology, with everything that a mode may ask about it."""

from dataclasses import dataclass

from fxpart.core.graph import OpGraph
from fxpart.core.topology import Topology
from fxpart.core.workload import Workload
from fxpart.cost.tables import CostTables, LatencySource, MemoryTables, cost_tables, memory_tables
from fxpart.errors import SpecError, nearest_names

__all__ = ["OBJECTIVES", "Problem", "make_problem"]

OBJECTIVES = ("latency", "throughput")
"""What a search makes small: the time of one input, or the largest load of any device or link."""


@dataclass(frozen=True, eq=False, slots=True)
class Problem:
    """What is placed, and on what. The tables hold the same facts, laid out for inner loops."""

    graph: OpGraph
    topology: Topology
    costs: CostTables
    memory: MemoryTables
    objective: str = "latency"
    """One of `OBJECTIVES`."""
    workload: Workload | None = None
    """The published problem that this is, whose own cost model counts (`fxpart.cost.blocking`)."""


def make_problem(
    graph: OpGraph,
    topology: Topology,
    latency: LatencySource,
    objective: str = "latency",
) -> Problem:
    """Return the problem of placing `graph` on `topology`.

    `latency` says how long operators take: a `LatencyModel` (the roofline), an `OperatorProfile`
    (measured), a `Calibration` (a roofline fitted to a profile), or a `Workload`, whose cost model
    then counts too. `objective` is one of `OBJECTIVES`.

    Raises:
        SpecError: for an objective that does not exist.

    """
    if objective not in OBJECTIVES:
        raise SpecError(
            f"objective={objective} does not exist; {nearest_names(objective, OBJECTIVES)}"
        )
    memory = memory_tables(graph)
    costs = cost_tables(graph, memory, topology, latency)
    workload = latency if isinstance(latency, Workload) else None
    return Problem(graph, topology, costs, memory, objective, workload)
