"""Classes of interchangeable devices."""

import numpy as np

from fxpart.core.graph import IntArray
from fxpart.core.topology import Topology
from fxpart.cost.problem import Problem

__all__ = ["device_kinds"]


def device_kinds(problem: Problem) -> IntArray:
    """Return the first device of each device's class of interchangeable devices. Shape (D,).

    Such devices are equal in memory, in the time of every operator, and in all links.
    """
    topology, times = problem.topology, problem.costs.op_time_s.T
    sizes = topology.memory_bytes.tolist()
    kinds = np.arange(topology.n_devices)
    firsts: dict[tuple[int, bytes], list[int]] = {}
    for device in range(topology.n_devices):
        same = firsts.setdefault((sizes[device], times[device].tobytes()), [])
        # The relation is transitive, so the first device represents its class.
        first = next((other for other in same if _linked_alike(topology, other, device)), None)
        if first is None:
            same.append(device)
        else:
            kinds[device] = first
    return kinds


def _linked_alike(topology: Topology, a: int, b: int) -> bool:
    """Return whether exchanging the two devices leaves every link unchanged."""
    for table in (topology.bytes_per_s, topology.latency_s):
        for rows in (table, table.T):
            exchanged = rows[a].copy()
            exchanged[[a, b]] = exchanged[[b, a]]
            if not np.array_equal(exchanged, rows[b]):
                return False
    return True
