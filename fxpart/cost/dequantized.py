"""Times of products with quantized weights that a change of bytes alone does not describe.

A library without a kernel for many rows, such as bitsandbytes, dequantizes the weights by a kernel
of its own before the product, also where the product is bound by arithmetic. An engine that casts
the inputs of products too, such as vLLM with FP8, multiplies at the rate of 8 bits.
"""

from dataclasses import dataclass, replace

import numpy as np

from fxpart.core.few_bits import WeightFormat, dequantized_bytes, quantized_inputs
from fxpart.core.graph import FloatArray, OpGraph, storage_roots
from fxpart.core.topology import Topology
from fxpart.cost.float8 import with_float8_rates
from fxpart.cost.tables import LatencySource

__all__ = ["TimesDequantized", "TimesWithCastInputs"]

_ELEMENT_BYTES, _CAST_BYTES = 2, 1
"""Bytes of an element before and after its cast to 8 bits."""


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


@dataclass(frozen=True, eq=False, slots=True)
class TimesWithCastInputs:
    """Operator times of a graph from `fxpart.core.few_bits.with_few_bits` with 8-bit products.

    A product takes the time of one in 16 bits on a device with its 8-bit rate, that reads its input
    in 8 bits. The first one that reads a tensor also takes the time to cast it, unless the operator
    that computes the tensor does that.
    """

    others: LatencySource
    """Source of the time of every kernel."""
    layout: WeightFormat
    fuses_casts: bool
    """Whether casts are part of the operators that compute what they cast, as when compiled."""

    def op_time_s(self, graph: OpGraph, topology: Topology) -> FloatArray:
        """Return the time of each operator on each device in seconds, shape (n, D).

        Raises:
            SpecError: if a device cannot multiply in 8 bits.

        """
        inputs, roots = quantized_inputs(graph, self.layout), storage_roots(graph)
        products = np.array(list(inputs), dtype=np.int64)
        read = np.array([graph.value_bytes[value] for value in inputs.values()], dtype=np.int64)
        elements = read // _ELEMENT_BYTES
        moved, flops = graph.moved_bytes.copy(), graph.flops.copy()
        moved[products] -= elements * (_ELEMENT_BYTES - _CAST_BYTES)
        faster = self.others.op_time_s(
            replace(graph, moved_bytes=moved), with_float8_rates(topology)
        )
        times = self.others.op_time_s(graph, topology).copy()
        times[products] = faster[products]
        if not self.fuses_casts:
            _, first = np.unique(roots[list(inputs.values())], return_index=True)
            casts = products[first]
            flops[casts], moved[casts] = 0, elements[first] * (_ELEMENT_BYTES + _CAST_BYTES)
            cast = replace(graph, flops=flops, moved_bytes=moved)
            times[casts] += self.others.op_time_s(cast, topology)[casts]
        return times
