"""Energy per input, from the rated power of the boards."""

import numpy as np
import numpy.typing as npt

from fxpart.core.graph import FloatArray
from fxpart.core.topology import Topology

__all__ = ["IDLE_SHARE", "energy_bound_j", "energy_j", "powers_w"]

IDLE_SHARE = 0.15
"""Assumed share of its rated power that a used device draws while idle: an idle H100 draws about
100 of 700 W, a T4 10 of 70."""


def powers_w(topology: Topology) -> FloatArray:
    """Return the rated power of each device in W, 0 if unknown. Shape (D,)."""
    return np.array([device.power_w for device in topology.devices], dtype=np.float64)


def energy_j(
    power_w: FloatArray, busy_s: FloatArray, used: npt.NDArray[np.bool_], latency_s: float
) -> float:
    """Return the energy of one input in J; arrays have shape (D,).

    A device draws its rated power while it computes, and `IDLE_SHARE` of it while it waits for
    others until the input is done. A device without operators draws nothing, as it could be left
    out.
    """
    idle_s = np.where(used, np.maximum(latency_s - busy_s, 0.0), 0.0)
    return float((power_w * (busy_s + IDLE_SHARE * idle_s)).sum())


def energy_bound_j(power_w: FloatArray, op_time_s: FloatArray, latency_s: float) -> float:
    """Return a lower bound of the energy of any placement.

    Each operator is charged at its most efficient device. At least one device draws idle power for
    `latency_s`, a lower bound of the latency. `op_time_s` has shape (n, D).
    """
    computing = float((op_time_s * power_w).min(axis=1).sum())
    return max(computing, IDLE_SHARE * float(power_w.min()) * latency_s)
