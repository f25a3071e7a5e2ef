"""Published problems small enough for brute force, and their cost model written with sets."""

import itertools
import json
import math
from pathlib import Path
from typing import Any

import numpy as np

from fxpart.capture.models.workload import read_workload
from fxpart.core.workload import Workload, workload_graph, workload_topology
from fxpart.cost.problem import Problem, make_problem


def document(seed: int, nodes: int = 7, accelerators: int = 2) -> dict[str, Any]:
    """Return a random problem as JSON, with two nodes of one colour, and one for the CPU only."""
    random = np.random.default_rng(seed)
    listed: list[dict[str, Any]] = [
        {
            "id": 10 + i,
            "name": f"op{i}",
            "supportedOnFpga": i != nodes // 2,
            "cpuLatency": float(random.integers(5, 60)),
            "fpgaLatency": float(random.integers(1, 9)),
            "size": float(random.integers(1, 5)),
            "isBackwardNode": 0,
        }
        for i in range(nodes)
    ]
    if seed % 2:
        listed[0]["colorClass"] = listed[nodes - 1]["colorClass"] = 3
    cost = random.integers(0, 5, nodes).tolist()
    edges = [
        {"sourceId": 10 + u, "destId": 10 + v, "cost": float(cost[u])}
        for u, v in itertools.combinations(range(nodes), 2)
        if random.random() < 0.35
    ]
    sizes = sum(int(str(node["size"]).split(".")[0]) for node in listed)
    return {
        "maxFPGAs": accelerators,
        "maxCPUs": 1,
        "maxSizePerFPGA": float(math.ceil(sizes * 0.6)),
        "nodes": listed,
        "edges": [*edges, *edges[:1]],
    }


def workload_at(folder: Path, content: dict[str, Any], most_pieces: int | None) -> Workload:
    """Return `content` as read back from a file."""
    path = folder / "problem.json"
    path.write_text(json.dumps(content))
    return read_workload(path, most_pieces)


def problem_of(workload: Workload, objective: str) -> Problem:
    """Return the workload as a problem for modes."""
    graph, topology = workload_graph(workload), workload_topology(workload)
    return make_problem(graph, topology, workload, objective)


def placements(workload: Workload) -> "itertools.product[tuple[int, ...]]":
    """Yield the devices of all operators in every combination."""
    return itertools.product(range(workload.n_devices), repeat=workload.n_ops)


def fits(w: Workload, device_of: tuple[int, ...]) -> bool:
    """Return whether colours, memory and support allow a placement."""
    used_bytes = [0] * w.n_devices
    for op, device in enumerate(device_of):
        used_bytes[device] += int(w.size_bytes[op])
        if device_of[w.colour[op]] != device:
            return False
        if device < w.accelerators and math.isinf(w.accelerator_s[op]):
            return False
    return all(size <= w.memory_bytes for size in used_bytes[: w.accelerators])


def largest_load_s(w: Workload, device_of: tuple[int, ...]) -> float:
    """Return the largest load by the published definition, device by device."""
    edges = list(zip(w.sources.tolist(), w.targets.tolist(), strict=True))
    loads = []
    for device in range(w.n_devices):
        here = {op for op in range(w.n_ops) if device_of[op] == device}
        if device >= w.accelerators:
            loads.append(sum(float(w.core_s[op]) for op in here))
            continue
        crossing = {u for u, v in edges if (u in here) != (v in here)}
        loads.append(sum(float(w.accelerator_s[op]) for op in here))
        loads[-1] += sum(float(w.move_s[op]) for op in crossing)
    return max(loads)


def sample_s(w: Workload, device_of: tuple[int, ...]) -> float:
    """Return the time of a sample by relaxation to a fixed point; infinite if there is none."""
    edges = list(zip(w.sources.tolist(), w.targets.tolist(), strict=True))
    finish = [0.0] * w.n_ops
    for _ in range(w.n_ops + 2):
        before = list(finish)
        for op in range(w.n_ops):
            piece = [op]
            if device_of[op] < w.accelerators:
                piece = [o for o in range(w.n_ops) if device_of[o] == device_of[op]]
            inputs = {u for u, v in edges if v in piece and u not in piece}
            outputs = {u for u, v in edges if u in piece and v not in piece}
            start = max((finish[u] for u in inputs), default=0.0)
            if device_of[op] < w.accelerators:
                seconds = sum(float(w.accelerator_s[o]) for o in piece)
                seconds += sum(float(w.move_s[u]) for u in inputs | outputs)
            else:
                seconds = float(w.core_s[op])
            finish[op] = start + seconds
        if finish == before:
            return max(finish)
    return math.inf
