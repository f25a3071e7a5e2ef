"""One measurement of `benchmarks.scale`, in its own process; prints the result as JSON.

``python -m benchmarks.scale_job capture GRAPH FILE`` builds a graph and writes it to the file;
``place FILE DEVICES MODE LIMIT_S`` places it with a mode; ``tools FILE DEVICES`` times the
functions that all modes share.
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
"""Functions that build a graph, by its name."""


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
    ).of_any_device()
    return build_topology(chosen.devices, chosen.transfer_rate), latency


def _read_graph(file: str) -> OpGraph:
    graph = read_graph(Path(file))
    if graph is None:
        raise SystemExit(f"{file} holds no graph; capture it first")
    return graph


def _configured_mode(mode: str, problem: Problem) -> Place:
    """Return the mode, ready to place `problem`; `aot_based` gets the plan of `size_based`."""
    if mode != "aot_based":
        return make_mode(mode)
    document = assignment_document(
        problem.graph, problem.topology, size_based(problem), {"name": "benchmark"}
    )
    path = Path(f"assignment_of_{problem.graph.n_ops}.json").resolve()
    path.write_text(json.dumps(document), encoding="utf-8")
    return make_mode(mode, {"assignment": str(path)})


def _place(file: str, devices: str, mode: str, limit_s: str) -> dict[str, Any]:
    # A small graph first, to compile the loops or read them from numba's cache.
    small = _problem(synthetic_graph(300), "4x16gb")
    try:
        evaluate(small, _configured_mode(mode, small)(small))
    except FxpartError as error:
        print(f"warm-up: {error}", file=sys.stderr)
    problem = _problem(_read_graph(file), devices)
    place = _configured_mode(mode, problem)
    # Past the limit the process ends without output.
    signal.setitimer(signal.ITIMER_REAL, float(limit_s))
    begin = time.perf_counter()
    try:
        assignment = place(problem)
    except FxpartError as error:
        return {"seconds": time.perf_counter() - begin, "error": str(error)}
    seconds = time.perf_counter() - begin
    signal.setitimer(signal.ITIMER_REAL, 0)
    return {"seconds": seconds, **_plan_metrics(problem, assignment)}


def _plan_metrics(problem: Problem, assignment: Assignment) -> dict[str, Any]:
    cost = evaluate(problem, assignment)
    return {
        "latency_s": cost.latency_s,
        "lower_bound_s": cost.lower_bound_s,
        "gap": cost.optimality_gap,
        "partitions": cost.partitions,
        "devices_used": cost.devices_used,
    }


def _tools(file: str, devices: str) -> dict[str, Any]:
    """Time `evaluate` and `partition_by_device`, with one stretch per device and with many."""
    small = _problem(synthetic_graph(300), "4x16gb")
    evaluate(small, partition_by_device(small.graph, _stretches(300, 4, 75)))
    graph = _read_graph(file)
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
        partitioned = time.perf_counter()
        evaluate(problem, assignment)
        result[f"partition_{name}_s"] = partitioned - begin
        result[f"evaluate_{name}_s"] = time.perf_counter() - partitioned
        result[f"partitions_{name}"] = assignment.n_partitions
    return result


def _stretches(n: int, devices: int, length: int) -> IntArray:
    """Return a device for each operator: one stretch per device, or at random if there are more."""
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
