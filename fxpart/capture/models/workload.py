"""Read published placement problems, the JSON of ``msr-fiddle/dnn-partitioning``."""

import heapq
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fxpart.core.device_spec import MAX_DEVICES
from fxpart.core.graph import IntArray
from fxpart.core.workload import Workload
from fxpart.errors import CycleError, SpecError
from fxpart.support.json_file import what_is_wrong
from fxpart.support.regular_file import read_regular

__all__ = ["read_workload"]

_MS = 1e-3
_MOST_MS = 1e12
_MOST_BYTES = 2.0**52


def read_workload(path: Path, most_pieces: int | None = None) -> Workload:
    """Return the problem in the JSON file at `path`, with times converted from ms to s.

    `most_pieces` is the maximum number of pieces on an accelerator. Duplicate edges count once.

    Raises:
        SpecError: if the file is missing, damaged or invalid.
        CycleError: if its operators form a cycle.

    """
    try:
        document = json.loads(read_regular(path))
    except FileNotFoundError:
        raise SpecError(f"there is no file {path}; set model.path to a published problem") from None
    except OSError as error:
        raise SpecError(f"cannot read {path}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise SpecError(f"{path} is damaged ({what_is_wrong(error)})") from error
    try:
        return _workload(path, document, most_pieces)
    except (KeyError, TypeError, AttributeError) as error:
        # Other messages are of Python's types, not of what the file lacks.
        lack = f" ({what_is_wrong(error)})" if isinstance(error, KeyError) else ""
        raise SpecError(
            f"{path} is not a published placement problem{lack}; it needs an object with maxFPGAs,"
            " maxCPUs, maxSizePerFPGA, and lists of objects: nodes and edges"
        ) from error


def _workload(path: Path, document: Mapping[str, Any], most_pieces: int | None) -> Workload:
    accelerators = _count(path, document, "maxFPGAs")
    cores = _count(path, document, "maxCPUs")
    if not 1 <= accelerators + cores <= MAX_DEVICES:
        raise SpecError(
            f"{path}: {accelerators} accelerators and {cores} CPU cores must be 1 to {MAX_DEVICES}"
        )
    nodes = list(document["nodes"])
    if not nodes:
        raise SpecError(f"{path} has no nodes: there is nothing to place")
    number = {node["id"]: index for index, node in enumerate(nodes)}
    if len(number) < len(nodes):
        raise SpecError(f"{path}: two of its nodes have the same id")
    edges = _edges(path, document["edges"], number)
    backward = [bool(node.get("isBackwardNode", False)) for node in nodes]
    order = _order(path, nodes, edges, backward)
    place = np.empty(len(nodes), dtype=np.int64)
    place[order] = np.arange(len(nodes))
    listed = [nodes[index] for index in order]
    pairs = sorted((int(place[u]), int(place[v])) for u, v in edges)
    move_ms = np.zeros(len(nodes))
    for (u, _), cost in edges.items():
        move_ms[place[u]] = cost
    runs = [bool(node.get("supportedOnFpga", True)) for node in listed]
    accelerator_ms = [
        _number(path, node, "fpgaLatency", _MOST_MS) if supported else math.inf
        for node, supported in zip(listed, runs, strict=True)
    ]
    core_ms = [
        _number(path, node, "cpuLatency", _MOST_MS) if cores else math.inf for node in listed
    ]
    workload = Workload(
        name=path.stem,
        names=tuple(str(node.get("name", node["id"])) for node in listed),
        accelerator_s=np.array(accelerator_ms) * _MS,
        core_s=np.array(core_ms) * _MS,
        move_s=move_ms * _MS,
        size_bytes=np.array(
            [round(_number(path, node, "size", _MOST_BYTES)) for node in listed], dtype=np.int64
        ),
        is_backward=np.array([backward[index] for index in order], dtype=np.bool_),
        colour=_colours(listed),
        sources=np.array([u for u, _ in pairs], dtype=np.int64),
        targets=np.array([v for _, v in pairs], dtype=np.int64),
        accelerators=accelerators,
        cores=cores,
        memory_bytes=int(_number(path, document, "maxSizePerFPGA", _MOST_BYTES)),
        most_pieces=most_pieces,
    )
    _refuse_homeless(path, workload)
    return workload


def _refuse_homeless(path: Path, workload: Workload) -> None:
    """Refuse operators that no accelerator supports if there is no CPU core."""
    if workload.cores:
        return
    homeless = np.flatnonzero(np.isinf(workload.accelerator_s))
    if len(homeless):
        raise SpecError(
            f"{path}: {workload.names[int(homeless[0])]} runs on CPU cores only, and maxCPUs is 0"
        )


def _number(path: Path, item: Mapping[str, Any], key: str, limit: float) -> float:
    value = item[key]
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= limit:
        raise SpecError(f"{path}: {key} must be a number from 0 to {limit:.3g}, got {value!r}")
    return float(value)


def _count(path: Path, document: Mapping[str, Any], key: str) -> int:
    value = _number(path, document, key, MAX_DEVICES)
    if not value.is_integer():
        raise SpecError(f"{path}: {key} must be a whole number, got {document[key]}")
    return int(value)


def _edges(
    path: Path, listed: list[Mapping[str, Any]], number: Mapping[object, int]
) -> dict[tuple[int, int], float]:
    """Return the ms of each edge by the indices of its ends in the list of nodes."""
    edges: dict[tuple[int, int], float] = {}
    cost_of: dict[int, float] = {}
    for edge in listed:
        for end in ("sourceId", "destId"):
            if edge[end] not in number:
                raise SpecError(f"{path}: an edge has {end} {edge[end]!r}, no node has that id")
        u, v = number[edge["sourceId"]], number[edge["destId"]]
        cost = _number(path, edge, "cost", _MOST_MS)
        if cost_of.setdefault(u, cost) != cost:
            raise SpecError(
                f"{path}: the edges from node {edge['sourceId']!r} cost {cost_of[u]} and {cost};"
                " every edge from a node moves the same output, at one cost"
            )
        edges[u, v] = cost
    return edges


def _order(
    path: Path,
    nodes: list[Mapping[str, Any]],
    edges: Mapping[tuple[int, int], float],
    backward: list[bool],
) -> IntArray:
    """Return the nodes in topological order, the forward first, otherwise in file order."""
    waits = [0] * len(nodes)
    after: list[list[int]] = [[] for _ in nodes]
    for u, v in edges:
        waits[v] += 1
        after[u].append(v)
    ready = [(backward[index], index) for index, count in enumerate(waits) if not count]
    heapq.heapify(ready)
    order: list[int] = []
    while ready:
        _, index = heapq.heappop(ready)
        order.append(index)
        for follower in after[index]:
            waits[follower] -= 1
            if not waits[follower]:
                heapq.heappush(ready, (backward[follower], follower))
    if len(order) < len(nodes):
        stuck = nodes[_in_a_cycle(edges, waits)]["id"]
        raise CycleError(f"{path}: node {stuck!r} is part of a cycle")
    return np.array(order, dtype=np.int64)


def _in_a_cycle(edges: Iterable[tuple[int, int]], waits: Sequence[int]) -> int:
    """Return a node of a cycle; `waits` counts for each node the edges from unprocessed nodes.

    Every waiting node has such an edge, so a walk against the edges ends in a cycle.
    """
    before = {v: u for u, v in edges if waits[u] and waits[v]}
    index = next(index for index, count in enumerate(waits) if count)
    seen: set[int] = set()
    while index not in seen:
        seen.add(index)
        index = before[index]
    return index


def _colours(listed: list[Mapping[str, Any]]) -> IntArray:
    first: dict[object, int] = {}
    colour = np.arange(len(listed), dtype=np.int64)
    for index, node in enumerate(listed):
        if node.get("colorClass") is not None:
            colour[index] = first.setdefault(node["colorClass"], index)
    return colour
