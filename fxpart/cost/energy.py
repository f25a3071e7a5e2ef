"""What one input costs in energy, from the power that boards are rated at."""

import numpy as np
import numpy.typing as npt

from fxpart.core.graph import FloatArray
from fxpart.core.topology import Topology

__all__ = ["IDLE_SHARE", "energy_bound_j", "energy_j", "powers_w"]

IDLE_SHARE = 0.15
"""Of its rated power, what a device in use draws while it waits. Assumed: an idle H100 draws some
100 of 700 W, a T4 10 of 70."""


def powers_w(topology: Topology) -> FloatArray:
    """Return the rated power of each device in W, 0 where nobody has said. Shape (D,)."""
    return np.array([device.power_w for device in topology.devices], dtype=np.float64)


def energy_j(
    power_w: FloatArray, busy_s: FloatArray, used: npt.NDArray[np.bool_], latency_s: float
) -> float:
    """Return the energy of one input in J; arrays have shape (D,).

    A device draws its rated power while it computes, and `IDLE_SHARE` of it while it waits for the
    others until the input is through. One without operators draws nothing: it may be left out.
    """
    idle_s = np.where(used, np.maximum(latency_s - busy_s, 0.0), 0.0)
    return float((power_w * (busy_s + IDLE_SHARE * idle_s)).sum())


def energy_bound_j(power_w: FloatArray, op_time_s: FloatArray, latency_s: float) -> float:
    """Return an energy that no placement is below: each operator where it takes least.

    `op_time_s` has shape (n, D); no placement has a lower latency than `latency_s`, all the while
    one device at least draws power.
    """
    computing = float((op_time_s * power_w).min(axis=1).sum())
    return max(computing, IDLE_SHARE * float(power_w.min()) * latency_s)
