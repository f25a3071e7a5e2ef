"""`Problem`: one model on one topology, with everything that a mode may ask about it."""

from dataclasses import dataclass

from fxpart.core.graph import OpGraph
from fxpart.core.topology import Topology
from fxpart.core.workload import Workload
from fxpart.cost.tables import CostTables, LatencySource, MemoryTables, cost_tables, memory_tables
from fxpart.errors import SpecError, nearest_names

__all__ = ["BY_TIME", "OBJECTIVES", "Problem", "make_problem"]

OBJECTIVES = ("latency", "throughput", "memory", "energy")
"""What a search makes small: the time of one input, the largest load of any device or link, the
bytes of the fullest device, or the energy of one input (`fxpart.cost.energy`)."""
BY_TIME = OBJECTIVES[:2]
"""Those in seconds; published problems have no others."""


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
        SpecError: for an objective that does not exist, one that a published problem does not have,
            and energy where no power of a device is known.

    """
    if objective not in OBJECTIVES:
        raise SpecError(
            f"objective={objective} does not exist; {nearest_names(objective, OBJECTIVES)}"
        )
    if objective not in BY_TIME and isinstance(latency, Workload):
        raise SpecError(
            f"objective={objective} is for models, a published problem has latency and throughput"
        )
    names = dict.fromkeys(device.name for device in topology.devices if not device.power_w)
    if objective == "energy" and names:
        raise SpecError(
            f"objective=energy needs the power of each device, {', '.join(names)} has none: add"
            " power_w: 300 to its file in conf/accelerator/"
        )
    memory = memory_tables(graph)
    costs = cost_tables(graph, memory, topology, latency)
    workload = latency if isinstance(latency, Workload) else None
    return Problem(graph, topology, costs, memory, objective, workload)
