"""Make one operator of several that must not part, and give each the partition of the whole.

Operators on a path between two that stay together stay with them, as a partition cannot wait for
itself. What one operator made of several needs is never less than what these need: a plan that fits
with it fits without.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from fxpart.core.graph import IntArray, csr
from fxpart.torch_compat.accounting.problem import StaticGraph

__all__ = ["Contraction", "contract", "joined"]


@dataclass(frozen=True, eq=False, slots=True)
class Contraction:
    """A graph in which some operators are one."""

    graph: StaticGraph
    whole_of: IntArray
    """The operator of `graph` that each original operator is part of. Length n."""


def joined(count: int, ties: Sequence[Sequence[int]]) -> list[int]:
    """Return for each of `count` operators the first that it is tied to, in one step or several."""
    first = list(range(count))

    def root(op: int) -> int:
        while first[op] != op:
            first[op] = first[first[op]]
            op = first[op]
        return op

    for tie in ties:
        for op in tie:
            a, b = sorted((root(tie[0]), root(op)))
            first[b] = a
    return [root(op) for op in range(count)]


def _finished(succ: list[list[int]]) -> list[int]:
    """Return the operators in the order in which a walk along `succ` leaves them for good."""
    seen, order = [False] * len(succ), []
    for start in range(len(succ)):
        stack = [] if seen[start] else [(start, 0)]
        seen[start] = True
        while stack:
            op, place = stack.pop()
            if place == len(succ[op]):
                order.append(op)
                continue
            stack.append((op, place + 1))
            after = succ[op][place]
            if not seen[after]:
                seen[after] = True
                stack.append((after, 0))
    return order


def _closed(before: list[list[int]], first: list[int]) -> list[int]:
    """Return `first` with everything that lies in a circle of tied operators tied to it.

    Strongly connected parts by two walks (Kosaraju).
    """
    n = len(first)
    pred: list[list[int]] = [[] for _ in range(n)]
    succ: list[list[int]] = [[] for _ in range(n)]
    for op in range(n):
        for read in before[op]:
            if first[read] != first[op]:
                pred[first[op]].append(first[read])
                succ[first[read]].append(first[op])
    part = [-1] * n
    for start in reversed(_finished(succ)):
        stack = [start] if part[start] < 0 else []
        while stack:
            op = stack.pop()
            if part[op] < 0:
                part[op] = start
                stack.extend(pred[op])
    return joined(n, [(op, first[op], part[first[op]]) for op in range(n)])


def _ordered(before: list[list[int]], first: list[int]) -> list[list[int]]:
    """Return the members of each whole, the wholes so that each comes after what it reads."""
    members: dict[int, list[int]] = {}
    for op, whole in enumerate(first):
        members.setdefault(whole, []).append(op)
    reads = {w: {first[x] for op in ops for x in before[op]} - {w} for w, ops in members.items()}
    readers: dict[int, list[int]] = {whole: [] for whole in members}
    for whole, read in reads.items():
        for other in sorted(read):
            readers[other].append(whole)
    waits = {whole: len(read) for whole, read in reads.items()}
    ready = [whole for whole in members if waits[whole] == 0]
    order = []
    while ready:
        order.append(heapq.heappop(ready))
        for reader in readers[order[-1]]:
            waits[reader] -= 1
            if waits[reader] == 0:
                heapq.heappush(ready, reader)
    return [members[whole] for whole in order]


def _longest_s(ops: Sequence[int], before: list[list[int]], latency_s: Sequence[float]) -> float:
    """Return the longest path among `ops`: what does not wait runs at the same time."""
    until: dict[int, float] = {}
    for op in ops:
        start = max((until[read] for read in before[op] if read in until), default=0.0)
        until[op] = start + latency_s[op]
    return max(until.values())


def _name(names: Sequence[str]) -> str:
    """Return one name for operators that stay together."""
    others = ", ".join(names[1:4]) + (", ..." if len(names) > 4 else "")
    return f"{names[0]} (together with {others})" if others else names[0]


def _rows(start: IntArray, items: IntArray) -> list[list[int]]:
    """Return the rows of a CSR array as lists."""
    flat, at = items.tolist(), start.tolist()
    return [flat[a:b] for a, b in pairwise(at)]


def _sent_bytes(graph: StaticGraph, before: list[list[int]], whole_of: list[int]) -> list[int]:
    """Return the bytes of the outputs of each whole that others read. One entry for each whole."""
    leaving = sorted(
        {x for op, row in enumerate(before) for x in row if whole_of[x] != whole_of[op]}
    )
    # What nobody reads goes to the caller: it counts as an output too.
    read = {x for row in before for x in row}
    sent = [0] * (max(whole_of) + 1)
    for op in [*leaving, *(op for op in range(len(before)) if op not in read)]:
        sent[whole_of[op]] += int(graph.output_bytes[op])
    return sent


def _received_again(
    ops: Sequence[int], before: list[list[int]], whole_of: list[int], output: Sequence[int]
) -> dict[int, int]:
    """Return the bytes that `ops` read from each other whole; each reader counts its own."""
    received: dict[int, int] = {}
    for op in ops:
        for read in before[op]:
            if whole_of[read] != whole_of[op]:
                received[whole_of[read]] = received.get(whole_of[read], 0) + output[read]
    return received


def _joint(
    graph: StaticGraph, before: list[list[int]], wholes: list[list[int]], whole_of: list[int]
) -> StaticGraph:
    """Return the graph of the wholes; `wholes` has the members of each."""
    output, total = graph.output_bytes.tolist(), graph.total_bytes.tolist()
    sent = _sent_bytes(graph, before, whole_of)
    received = [_received_again(ops, before, whole_of, output) for ops in wholes]
    again = [sum(max(0, b - sent[w]) for w, b in row.items()) for row in received]
    sources = _rows(graph.source_start, graph.sources)
    read_start, reads = csr([list(row) for row in received])
    source_start, used = csr(
        [list(dict.fromkeys(s for x in o for s in sources[x])) for o in wholes]
    )
    seconds = graph.latency_s.tolist()
    return StaticGraph(
        names=tuple(_name([graph.names[op] for op in ops]) for ops in wholes),
        total_bytes=np.array(
            [sum(total[op] for op in o) + a for o, a in zip(wholes, again, strict=True)],
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
    """Return `graph` with one operator for the members of each tie. O(reads), without recursion.

    Weights and outputs of a whole are the sums; it reads what its members read; its latency is that
    of the longest path in it. Its output is what others read of it. Where several members read one
    value, each counts it, as `fxpart.torch_compat.accounting.cost` does.

    Args:
        graph: the operators.
        ties: operators that stay together, in each tie at least one.

    """
    if not ties:
        return Contraction(graph, np.arange(graph.n_ops))
    before = _rows(graph.read_start, graph.reads)
    wholes = _ordered(before, _closed(before, joined(graph.n_ops, ties)))
    whole_of = [0] * graph.n_ops
    for whole, ops in enumerate(wholes):
        for op in ops:
            whole_of[op] = whole
    joint = _joint(graph, before, wholes, whole_of)
    return Contraction(joint, np.array(whole_of, dtype=np.int64))
