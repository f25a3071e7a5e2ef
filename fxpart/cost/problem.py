"""`Problem`: one model on one topology, with everything that a mode may ask about it."""

from dataclasses import dataclass

from fxpart.core.graph import OpGraph
from fxpart.core.topology import Topology
from fxpart.cost.tables import CostTables, LatencySource, MemoryTables, cost_tables, memory_tables

__all__ = ["Problem", "make_problem"]


@dataclass(frozen=True, eq=False, slots=True)
class Problem:
    """What is placed, and on what. The tables hold the same facts, laid out for inner loops."""

    graph: OpGraph
    topology: Topology
    costs: CostTables
    memory: MemoryTables


def make_problem(graph: OpGraph, topology: Topology, latency: LatencySource) -> Problem:
    """Return the problem of placing `graph` on `topology`.

    `latency` says how long operators take: a `LatencyModel` (the roofline), an `OperatorProfile`
    (measured) or a `Calibration` (a roofline fitted to a profile).
    """
    memory = memory_tables(graph)
    return Problem(graph, topology, cost_tables(graph, memory, topology, latency), memory)
