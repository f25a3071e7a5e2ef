"""The partitions of a placement in numbers: operators, weights, times, and bytes on edges."""

from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np

from fxpart.core.assignment import Assignment
from fxpart.core.graph import FloatArray, IntArray, OpGraph
from fxpart.cost.evaluation import Evaluation
from runner.output.units import format_ids, format_s, format_size

__all__ = ["Edge", "PartitionSummary", "columns", "device_matrix", "summarise", "title_of"]


@dataclass(frozen=True, slots=True)
class Edge:
    """An edge: a partition reads values produced by another."""

    source: int
    target: int
    crosses: bool
    """Whether the two are on different devices."""
    sent_bytes: int
    """Bytes sent for the target; 0 if all were sent for an earlier partition on that device."""


@dataclass(frozen=True, eq=False, slots=True)
class PartitionSummary:
    """The partitions in numbers. Arrays have an item per partition."""

    device: IntArray
    """Logical id of the device that computes it for the first input."""
    operators: IntArray
    weight_bytes: IntArray
    """Bytes of the weights that it uses, each once; partitions may share weights."""
    time_s: FloatArray
    """Time of its operators, without waiting."""
    edges: tuple[Edge, ...]
    """Edges, sorted by source, then target."""
    modules: tuple[tuple[str, ...], ...]
    """Its modules, such as ``layers 0-9`` and ``norm``, those with the most operators first."""
    is_backward: tuple[bool, ...]
    """Whether all its operators belong to the backward."""


def summarise(graph: OpGraph, assignment: Assignment, evaluation: Evaluation) -> PartitionSummary:
    """Return the summary of all partitions. The bytes of the edges add up to the bytes sent."""
    partition_of, count = assignment.partition_of, assignment.n_partitions
    order = np.argsort(partition_of, kind="stable")
    members = np.split(order, np.cumsum(np.bincount(partition_of, minlength=count))[:-1])
    user = np.repeat(np.arange(graph.n_ops), np.diff(graph.use_start))
    pairs = np.unique(np.stack([partition_of[user], graph.uses]), axis=1)
    return PartitionSummary(
        device=np.array([homes[0] for homes in assignment.devices_of_partition], dtype=np.int64),
        operators=np.bincount(partition_of, minlength=count).astype(np.int64),
        weight_bytes=_sums(pairs[0], graph.weight_bytes[pairs[1]], count),
        time_s=np.bincount(
            partition_of, weights=evaluation.op_finish_s - evaluation.op_start_s, minlength=count
        ).astype(np.float64),
        edges=_edges(graph, assignment),
        modules=tuple(_modules_of(graph, ops) for ops in members),
        is_backward=tuple(bool(graph.is_backward[ops].all()) for ops in members),
    )


def _modules_of(graph: OpGraph, operators: IntArray) -> tuple[str, ...]:
    """Return the modules of operators, with numbered modules as ranges."""
    counts: Counter[tuple[str, int | None]] = Counter()
    for path in (graph.modules[op] for op in operators.tolist()):
        counts[_named(path)] += 1
    total: Counter[str] = Counter()
    numbers: dict[str, list[int]] = {}
    for (name, number), count in counts.items():
        total[name] += count
        numbers.setdefault(name, []).extend([] if number is None else [number])
    return tuple(
        f"{name} {format_ids(tuple(numbers[name]))}" if numbers[name] else name
        for name, _ in sorted(total.items(), key=lambda item: (-item[1], item[0]))
    )


@lru_cache(maxsize=4096)
def _named(path: str) -> tuple[str, int | None]:
    """Return a module's name and number: layers and 3 for ``model.layers.3.mlp``."""
    parts = path.split(".")
    for parent, part in pairwise(parts):
        if part.isdecimal():
            return parent, int(part)
    if parts[0].isdecimal():
        return "modules", int(parts[0])
    # Skip the model's wrapper, as in `model.embed_tokens`.
    return parts[1] if len(parts) > 1 else parts[0] or "the model", None


def _sums(index: IntArray, amounts: IntArray, count: int) -> IntArray:
    """Return the sum for each index in integers, since floats would round."""
    total = np.zeros(count, dtype=np.int64)
    np.add.at(total, index, amounts)
    return total


def _edges(graph: OpGraph, assignment: Assignment) -> tuple[Edge, ...]:
    count, device_of = assignment.n_partitions, assignment.device_of
    reader = np.repeat(np.arange(graph.n_ops), np.diff(graph.read_start))
    is_produced = graph.value_producer[graph.reads] >= 0
    reader, value = reader[is_produced], graph.reads[is_produced]
    maker = graph.value_producer[value]
    source, target = assignment.partition_of[maker], assignment.partition_of[reader]
    crosses = device_of[maker] != device_of[reader]
    # A value is sent to each device once, for the first partition there that reads it.
    arrival = value * (int(device_of.max()) + 1) + device_of[reader]
    first = np.zeros(len(value), dtype=np.bool_)
    first[np.unique(arrival, return_index=True)[1]] = True
    sent = np.where(crosses & first, graph.value_bytes[value], 0)
    between = source != target
    pair, where = np.unique((source * count + target)[between], return_inverse=True)
    sent_bytes = _sums(where, sent[between], len(pair))
    crossing = np.zeros(len(pair), dtype=np.bool_)
    crossing[where] = crosses[between]
    rows = zip(pair.tolist(), crossing.tolist(), sent_bytes.tolist(), strict=True)
    return tuple(Edge(code // count, code % count, over, size) for code, over, size in rows)


def title_of(summary: PartitionSummary, evaluation: Evaluation) -> str:
    """Return the title of a drawing: partitions, devices, time, and bytes transferred."""
    sent_bytes = sum(edge.sent_bytes for edge in summary.edges)
    turns = f", the first of {evaluation.rounds} inputs in turn" if evaluation.rounds > 1 else ""
    return (
        f"{len(summary.device)} partitions on {len(set(summary.device.tolist()))} devices:"
        f" {format_s(evaluation.latency_s)}, {format_size(sent_bytes)} transferred{turns}"
    )


def columns(summary: PartitionSummary) -> list[int]:
    """Return the column of each partition: right of its inputs, and unique in its lane."""
    sources: list[list[int]] = [[] for _ in summary.device]
    for edge in summary.edges:
        sources[edge.target].append(edge.source)
    column: list[int] = []
    next_free: dict[int, int] = {}
    for partition, device in enumerate(summary.device.tolist()):
        first_column = max((column[source] + 1 for source in sources[partition]), default=0)
        column.append(max(first_column, next_free.get(device, 0)))
        next_free[device] = column[-1] + 1
    return column


def device_matrix(summary: PartitionSummary) -> dict[tuple[int, int], int]:
    """Return the bytes sent between pairs of devices, for pairs that send any."""
    total: dict[tuple[int, int], int] = {}
    for edge in summary.edges:
        if edge.sent_bytes:
            pair = (int(summary.device[edge.source]), int(summary.device[edge.target]))
            total[pair] = total.get(pair, 0) + edge.sent_bytes
    return total
