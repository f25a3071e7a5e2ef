"""What times of operators can come from: a roofline, a profile, or a calibration."""

from typing import Protocol

import numpy as np

from fxpart.graph import FloatArray, OpGraph
from fxpart.topology import Topology

__all__ = ["LatencySource", "same_on_every_device"]


class LatencySource(Protocol):
    """Anything that knows how long operators take."""

    def op_time_s(self, graph: OpGraph, topology: Topology) -> FloatArray:
        """Return the time of each operator on each device in seconds, shape (n, D)."""
        ...


def same_on_every_device(seconds: FloatArray, topology: Topology) -> FloatArray:
    """Return `seconds` (shape n) as the times on each device of `topology`, shape (n, D)."""
    return np.repeat(seconds[:, None], topology.n_devices, axis=1)
