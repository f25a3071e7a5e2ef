"""`lower`: convert an fx graph into the arrays used by placement searches."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from torch.fx import GraphModule, Node

from fxpart.core.graph import IntArray, csr
from fxpart.errors import CaptureError
from fxpart.execution.split.graph_module import is_guard
from fxpart.torch_compat.accounting.problem import StaticGraph
from fxpart.torch_compat.partitioner.config import NodeLatency
from fxpart.torch_compat.partitioner.node_sizes import SOURCES, size_of
from fxpart.torch_compat.partitioner.partition import Partition

__all__ = ["Lowered", "lower", "lower_partitions"]


@dataclass(frozen=True, eq=False, slots=True)
class Lowered:
    """An fx graph as arrays, and the nodes behind their indices."""

    ops: tuple[Node, ...]
    """Call nodes in graph order. Length n."""
    sources: tuple[Node, ...]
    """Placeholders and attributes in graph order. Length m."""
    graph: StaticGraph


def _lower(nodes: Iterable[Node], latencies: Mapping[Node, NodeLatency]) -> Lowered:
    """Return the arrays of `nodes`; nodes read from outside are sources."""
    members = dict.fromkeys(nodes)
    ops = [n for n in members if n.op not in SOURCES]
    outside = dict.fromkeys(x for op in ops for x in op.all_input_nodes if x not in members)
    sources = [*(n for n in members if n.op in SOURCES), *outside]
    op_at = {node: index for index, node in enumerate(ops)}
    source_at = {node: index for index, node in enumerate(sources)}
    operands = [node.all_input_nodes for node in ops]
    sizes = [size_of(node) for node in ops]
    read_start, reads = csr([[op_at[x] for x in row if x in op_at] for row in operands])
    source_start, source_indices = csr(
        [[source_at[x] for x in row if x in source_at] for row in operands]
    )
    seconds = [max(latencies[n]) if n in latencies else 0.0 for n in ops]
    graph = StaticGraph(
        names=tuple(node.name for node in ops),
        total_bytes=np.array([size.total_size for size in sizes], dtype=np.int64),
        output_bytes=np.array([size.output_size for size in sizes], dtype=np.int64),
        latency_s=np.array(seconds, dtype=np.float64),
        read_start=read_start,
        reads=reads,
        source_bytes=np.array([size_of(n).output_size for n in sources], dtype=np.int64),
        source_start=source_start,
        sources=source_indices,
    )
    return Lowered(tuple(ops), tuple(sources), graph)


def lower(fx_module: GraphModule, latencies: Mapping[Node, NodeLatency]) -> Lowered:
    """Return the graph of `fx_module` as arrays. O(graph).

    The input check of an exported module is not an operator; see
    `fxpart.execution.split.graph_module.is_guard`.

    Raises:
        CaptureError: if the graph has no operators, or a node has no size.

    """
    nodes = [n for n in fx_module.graph.nodes if n.op != "output" and not is_guard(n)]
    if all(node.op in SOURCES for node in nodes):
        raise CaptureError(
            f"no partition: the module has no operators, only {len(nodes)} inputs and attributes;"
            " give a graph that computes something"
        )
    return _lower(nodes, latencies)


def lower_partitions(partitions: Sequence[Partition]) -> tuple[StaticGraph, IntArray]:
    """Return the nodes of `partitions` as arrays, and the partition's index for each call node.

    Raises:
        CaptureError: if a node has no size.

    """
    index_of = {node: index for index, p in enumerate(partitions) for node in p.nodes}
    lowered = _lower(sorted(index_of), {})
    partition_of = np.array([index_of[op] for op in lowered.ops], dtype=np.int64)
    return lowered.graph, partition_of
