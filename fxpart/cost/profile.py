"""`OperatorProfile`: how long each operator of one graph took when it was really run.

It is measured in `fxpart.profiling`; here are only numbers, so that a warm start needs no torch.
"""

from dataclasses import dataclass

import numpy as np

from fxpart.cost.latency_source import same_on_every_device
from fxpart.errors import SpecError
from fxpart.graph import FloatArray, IntArray, OpGraph
from fxpart.topology import Topology

__all__ = ["OperatorProfile"]


@dataclass(frozen=True, eq=False, slots=True)
class OperatorProfile:
    """Measured times of the operators of one graph, on one kind of device."""

    seconds: FloatArray
    """Time of each operator. Length n."""
    samples: IntArray
    """How many measurements each time is the median of. Length n."""
    device_name: str
    """What it was measured on, such as ``NVIDIA H200`` or a CPU with its number of threads."""
    executed: int = 0
    """Operators that were run to make this profile; 0 when every time was known before."""

    def __post_init__(self) -> None:
        """Refuse times that are no times."""
        if len(self.seconds) != len(self.samples):
            raise SpecError(
                f"a profile has {len(self.seconds)} times and {len(self.samples)} counts of"
                " samples; give one of each for every operator"
            )
        wrong = np.flatnonzero(~(np.isfinite(self.seconds) & (self.seconds >= 0)))
        if len(wrong):
            raise SpecError(
                f"a profile's time of operator {int(wrong[0])} is {self.seconds[wrong[0]]} s;"
                " times must be finite and at least 0"
            )

    @property
    def total_s(self) -> float:
        """Return the sum of all operators' times: one run on one device."""
        return float(self.seconds.sum())

    def op_time_s(self, graph: OpGraph, topology: Topology) -> FloatArray:
        """Return the time of each operator on each device in seconds, shape (n, D).

        The same on every device: one kind of device was measured. `graph` may be grouped in
        another way than the one that was profiled, but has the same operators.

        Raises:
            SpecError: for a graph with another number of operators.

        """
        if graph.n_ops != len(self.seconds):
            raise SpecError(
                f"the profile is of {len(self.seconds)} operators and the graph has {graph.n_ops};"
                " profile this graph"
            )
        return same_on_every_device(self.seconds, topology)
