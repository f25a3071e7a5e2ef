"""Times of products whose quantized weights are first written out as a copy.

A library without a kernel for many rows, such as bitsandbytes, dequantizes the weights by a kernel
of its own before the product, also where the product is bound by arithmetic.
"""

from dataclasses import dataclass, replace

import numpy as np

from fxpart.core.few_bits import WeightFormat, dequantized_bytes
from fxpart.core.graph import FloatArray, OpGraph
from fxpart.core.topology import Topology
from fxpart.cost.tables import LatencySource

__all__ = ["TimesDequantized"]


@dataclass(frozen=True, eq=False, slots=True)
class TimesDequantized:
    """Operator times of a graph from `fxpart.core.few_bits.with_few_bits`.

    A product that reads a copy of its weights takes the time of one in 16 bits, and the time to
    read the quantized weights and write the copy.
    """

    others: LatencySource
    """Source of the time of every kernel."""
    layout: WeightFormat

    def op_time_s(self, graph: OpGraph, topology: Topology) -> FloatArray:
        """Return the time of each operator on each device in seconds, shape (n, D)."""
        copied = dequantized_bytes(graph, self.layout)
        if not copied:
            return self.others.op_time_s(graph, topology)
        products = np.array(list(copied), dtype=np.int64)
        moved, flops = graph.moved_bytes.copy(), graph.flops.copy()
        moved[products] -= list(copied.values())
        times = self.others.op_time_s(replace(graph, moved_bytes=moved), topology)
        # Operators that only move these bytes.
        flops[products], moved[products] = 0, list(copied.values())
        copying = self.others.op_time_s(replace(graph, flops=flops, moved_bytes=moved), topology)
        times = times.copy()
        times[products] += copying[products]
        return times
