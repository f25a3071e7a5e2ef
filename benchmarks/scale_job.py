"""One measurement of `benchmarks.scale`, in a process of its own; prints what it found as JSON.

``python -m benchmarks.scale_job capture GRAPH FILE`` makes a graph and keeps it in the file;
``place FILE DEVICES MODE LIMIT_S`` lets a mode place it; ``tools FILE DEVICES`` times what all
modes share.
"""

import json
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.composed import composed
from benchmarks.synthetic import chain_graph, diamonds_graph, synthetic_graph
from fxpart.capture.cache import read_graph, write_graph
from fxpart.core.assignment import Assignment
from fxpart.core.graph import IntArray, OpGraph
from fxpart.core.partitions import partition_by_device
from fxpart.core.saved_assignment import assignment_document
from fxpart.core.topology import Topology
from fxpart.cost.evaluate import evaluate
from fxpart.cost.problem import Problem, make_problem
from fxpart.cost.roofline import LatencyModel
from fxpart.errors import FxpartError
from fxpart.placement import Place, make_mode, size_based
from runner.experiment.model_spec import model_spec
from runner.experiment.topology import build_topology

__all__ = ["MAKERS"]


def _inference_graph(model: str) -> OpGraph:
    from fxpart.capture.captured import captured_graph

    return captured_graph(model_spec(composed(f"model={model}")), "operator", None).graph


def _training_graph(model: str) -> OpGraph:
    from fxpart.capture.models.build import build_model
    from fxpart.capture.training.joint import joint_graph

    built = build_model(model_spec(composed(f"model={model}")))
    return joint_graph(built.module, built.args, built.kwargs)


MAKERS: dict[str, Callable[[], OpGraph]] = {
    "llama2_13b": lambda: _inference_graph("llama2_13b"),
    "llama3_70b_training": lambda: _training_graph("llama3_70b"),
    "synthetic": lambda: synthetic_graph(100_000, 0),
    "chain": lambda: chain_graph(100_000),
    "diamonds": lambda: diamonds_graph(10_000),
}
"""Name of a graph to what makes it."""


def _capture(graph_name: str, file: str) -> dict[str, Any]:
    begin = time.perf_counter()
    graph = MAKERS[graph_name]()
    seconds = time.perf_counter() - begin
    write_graph(Path(file), graph)
    return {"capture_s": seconds}


def _problem(graph: OpGraph, devices: str) -> Problem:
    return make_problem(graph, *_machine(devices))


def _machine(devices: str) -> tuple[Topology, LatencyModel]:
    chosen = composed(f"devices={devices}")
    latency = LatencyModel(
        compute_efficiency=chosen.latency.compute_efficiency,
        bandwidth_efficiency=chosen.latency.bandwidth_efficiency,
        op_overhead_s=chosen.latency.op_overhead_s,
    )
    return build_topology(chosen.devices, chosen.transfer_rate), latency


def _kept(file: str) -> OpGraph:
    graph = read_graph(Path(file))
    if graph is None:
        raise SystemExit(f"{file} holds no graph; capture it first")
    return graph


def _ready(mode: str, problem: Problem) -> Place:
    """Return the mode, ready to place `problem`; `aot_based` takes what `size_based` finds."""
    if mode != "aot_based":
        return make_mode(mode)
    document = assignment_document(
        problem.graph, problem.topology, size_based(problem), {"name": "benchmark"}
    )
    path = Path(f"assignment_of_{problem.graph.n_ops}.json").resolve()
    path.write_text(json.dumps(document), encoding="utf-8")
    return make_mode(mode, {"assignment": str(path)})


def _place(file: str, devices: str, mode: str, limit_s: str) -> dict[str, Any]:
    # Loops are compiled, or read from numba's cache, on a small graph first.
    small = _problem(synthetic_graph(300), "4x16gb")
    try:
        evaluate(small, _ready(mode, small)(small))
    except FxpartError as error:
        print(f"warm-up: {error}", file=sys.stderr)
    problem = _problem(_kept(file), devices)
    place = _ready(mode, problem)
    # Past the limit the process ends without a word.
    signal.setitimer(signal.ITIMER_REAL, float(limit_s))
    begin = time.perf_counter()
    try:
        assignment = place(problem)
    except FxpartError as error:
        return {"seconds": time.perf_counter() - begin, "error": str(error)}
    seconds = time.perf_counter() - begin
    signal.setitimer(signal.ITIMER_REAL, 0)
    return {"seconds": seconds, **_found(problem, assignment)}


def _found(problem: Problem, assignment: Assignment) -> dict[str, Any]:
    cost = evaluate(problem, assignment)
    return {
        "latency_s": cost.latency_s,
        "lower_bound_s": cost.lower_bound_s,
        "gap": cost.optimality_gap,
        "partitions": cost.partitions,
        "devices_used": cost.devices_used,
    }


def _tools(file: str, devices: str) -> dict[str, Any]:
    """Time `evaluate` and `partition_by_device`, on one stretch a device and on many."""
    small = _problem(synthetic_graph(300), "4x16gb")
    evaluate(small, partition_by_device(small.graph, _stretches(300, 4, 75)))
    graph = _kept(file)
    result: dict[str, Any] = {"operators": graph.n_ops, "weight_bytes": graph.total_weight_bytes}
    machine = _machine(devices)
    begin = time.perf_counter()
    problem = make_problem(graph, *machine)
    result["tables_s"] = time.perf_counter() - begin
    count = problem.topology.n_devices
    for name, length in (("contiguous", -(-graph.n_ops // count)), ("scattered", 20)):
        device_of = _stretches(graph.n_ops, count, length)
        begin = time.perf_counter()
        assignment = partition_by_device(graph, device_of)
        cut = time.perf_counter()
        evaluate(problem, assignment)
        result[f"partition_{name}_s"] = cut - begin
        result[f"evaluate_{name}_s"] = time.perf_counter() - cut
        result[f"partitions_{name}"] = assignment.n_partitions
    return result


def _stretches(n: int, devices: int, length: int) -> IntArray:
    """Return a device for each operator: in turn, or at random where stretches are more."""
    stretch = np.arange(n, dtype=np.int64) // length
    if int(stretch[-1]) < devices:
        return stretch
    drawn = np.random.default_rng(0).integers(0, devices, int(stretch[-1]) + 1)
    return drawn[stretch].astype(np.int64)


_JOBS: dict[str, Callable[..., dict[str, Any]]] = {
    "capture": _capture,
    "place": _place,
    "tools": _tools,
}

if __name__ == "__main__":
    print(json.dumps(_JOBS[sys.argv[1]](*sys.argv[2:])))
