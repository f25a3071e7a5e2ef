"""`contract`: merge operators that must stay in one partition.

Operators on a path between them are merged too, since a partition cannot wait for itself. The
merged operator never needs less memory than its members, so a plan that fits with it fits without.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from fxpart.core.graph import IntArray, csr
from fxpart.torch_compat.accounting.problem import StaticGraph

__all__ = ["Contraction", "contract"]


@dataclass(frozen=True, eq=False, slots=True)
class Contraction:
    """A graph in which groups of operators are merged."""

    graph: StaticGraph
    whole_of: IntArray
    """The operator of `graph` that contains each original operator. Length n."""


def _wholes(before: list[list[int]], ties: Sequence[Sequence[int]]) -> list[list[int]]:
    """Return the groups of operators to merge ("wholes"), in topological order.

    Tied operators and everything on a path between them form a cycle, so the wholes are the
    strongly connected components of the reads and the ties. Among ready wholes, the one with the
    first operator comes next.
    """
    # Imported only if a graph has ties, which is rare, since it takes half a second.
    import networkx

    reads = networkx.DiGraph((read, op) for op, row in enumerate(before) for read in row)
    reads.add_nodes_from(range(len(before)))
    reads.add_edges_from((tie[0], op) for tie in ties for op in tie[1:])
    reads.add_edges_from((op, tie[0]) for tie in ties for op in tie[1:])
    whole_of = {
        op: min(members)
        for members in networkx.strongly_connected_components(reads)
        for op in members
    }
    members: dict[int, list[int]] = {}
    for op in range(len(before)):
        members.setdefault(whole_of[op], []).append(op)
    order = networkx.DiGraph((whole_of[a], whole_of[b]) for a, b in reads.edges)
    order.remove_edges_from(list(networkx.selfloop_edges(order)))
    order.add_nodes_from(members)
    return [members[whole] for whole in networkx.lexicographical_topological_sort(order)]


def _longest_s(ops: Sequence[int], before: list[list[int]], latency_s: Sequence[float]) -> float:
    """Return the longest path among `ops`, as independent operators run concurrently."""
    until: dict[int, float] = {}
    for op in ops:
        start = max((until[read] for read in before[op] if read in until), default=0.0)
        until[op] = start + latency_s[op]
    return max(until.values())


def _name(names: Sequence[str]) -> str:
    """Return one name for several operators."""
    other_names = ", ".join(names[1:4]) + (", ..." if len(names) > 4 else "")
    return f"{names[0]} (together with {other_names})" if other_names else names[0]


def _rows(start: IntArray, items: IntArray) -> list[list[int]]:
    """Return the rows of a CSR array as lists."""
    flat, bounds = items.tolist(), start.tolist()
    return [flat[a:b] for a, b in pairwise(bounds)]


def _sent_bytes(graph: StaticGraph, before: list[list[int]], whole_of: list[int]) -> list[int]:
    """Return the bytes of each whole's outputs read by other wholes or the caller."""
    read_elsewhere = {
        x for op, row in enumerate(before) for x in row if whole_of[x] != whole_of[op]
    }
    # An output without readers is returned to the caller.
    unread = set(range(len(before))) - {x for row in before for x in row}
    sent = [0] * (max(whole_of) + 1)
    for op in read_elsewhere | unread:
        sent[whole_of[op]] += int(graph.output_bytes[op])
    return sent


def _received_bytes(
    ops: Sequence[int], before: list[list[int]], whole_of: list[int], output: Sequence[int]
) -> dict[int, int]:
    """Return the bytes that `ops` read from each other whole, counted once per reader."""
    received: dict[int, int] = {}
    for op in ops:
        for read in before[op]:
            if whole_of[read] != whole_of[op]:
                received[whole_of[read]] = received.get(whole_of[read], 0) + output[read]
    return received


def _joint(
    graph: StaticGraph, before: list[list[int]], wholes: list[list[int]], whole_of: list[int]
) -> StaticGraph:
    """Return the graph of the wholes, given their members."""
    output, total = graph.output_bytes.tolist(), graph.total_bytes.tolist()
    sent = _sent_bytes(graph, before, whole_of)
    received = [_received_bytes(ops, before, whole_of, output) for ops in wholes]
    repeated_bytes = [sum(max(0, b - sent[w]) for w, b in row.items()) for row in received]
    sources = _rows(graph.source_start, graph.sources)
    read_start, reads = csr([list(row) for row in received])
    source_start, used = csr(
        [list(dict.fromkeys(s for x in o for s in sources[x])) for o in wholes]
    )
    seconds = graph.latency_s.tolist()
    return StaticGraph(
        names=tuple(_name([graph.names[op] for op in ops]) for ops in wholes),
        total_bytes=np.array(
            [sum(total[op] for op in o) + a for o, a in zip(wholes, repeated_bytes, strict=True)],
            dtype=np.int64,
        ),
        output_bytes=np.array(sent, dtype=np.int64),
        latency_s=np.array([_longest_s(ops, before, seconds) for ops in wholes], dtype=np.float64),
        read_start=read_start,
        reads=reads,
        source_bytes=graph.source_bytes,
        source_start=source_start,
        sources=used,
    )


def contract(graph: StaticGraph, ties: Sequence[Sequence[int]]) -> Contraction:
    """Return `graph` with the members of each tie merged into one operator. O(reads log n).

    A merged operator has the summed weights and outputs, the reads, and the longest path of its
    members. Its output is the values that others read. A value read by several members counts once
    per reader, as in `fxpart.torch_compat.accounting.cost`.

    Args:
        graph: the operators.
        ties: non-empty groups of operators that must stay together.

    """
    if not ties:
        return Contraction(graph, np.arange(graph.n_ops))
    before = _rows(graph.read_start, graph.reads)
    wholes = _wholes(before, ties)
    whole_of = [0] * graph.n_ops
    for whole, ops in enumerate(wholes):
        for op in ops:
            whole_of[op] = whole
    joint = _joint(graph, before, wholes, whole_of)
    return Contraction(joint, np.array(whole_of, dtype=np.int64))
