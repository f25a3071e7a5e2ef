"""`GraphArrays`: the arrays of a `StaticGraph` that say what takes memory, for compiled loops."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from fxpart.graph import IntArray
from fxpart.static.graph import StaticGraph

__all__ = ["BoolArray", "GraphArrays", "arrays_of"]

BoolArray = npt.NDArray[np.bool_]


class GraphArrays(NamedTuple):
    """Bytes and reads of n operators and m sources; fields as in `StaticGraph`."""

    total: IntArray
    """Weights and output of each operator, bytes. Length n."""
    output: IntArray
    """Output of each operator, bytes. Length n."""
    read_start: IntArray
    reads: IntArray
    source_bytes: IntArray
    source_start: IntArray
    sources: IntArray


def arrays_of(graph: StaticGraph) -> GraphArrays:
    """Return the arrays of `graph`, not copied."""
    return GraphArrays(
        graph.total_bytes,
        graph.output_bytes,
        graph.read_start,
        graph.reads,
        graph.source_bytes,
        graph.source_start,
        graph.sources,
    )
