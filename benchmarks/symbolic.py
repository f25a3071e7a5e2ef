"""``python -m benchmarks.symbolic [--only MODEL ...] [--phases PHASE ...]``: formulas and captures.

Each model is captured once with a symbolic batch, and again at each of several batch sizes. For
each size, the table shows the number of operators that only one of the two captures has, and of
common ones that differ in FLOPs or bytes moved; then the difference in bytes between the peak
formula and the peak of the fresh capture, and the relative difference between the latency formula
and the simulation, on one device and on four. The time of a sweep over 64 batch sizes follows,
beside that of the capture. Training steps use adam.
"""

import argparse
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from difflib import SequenceMatcher

import numpy as np

from benchmarks.execution_models import MODELS
from benchmarks.text_table import table
from fxpart.capture.api import capture_graph
from fxpart.capture.models.build import build_model
from fxpart.capture.models.spec import ModelSpec
from fxpart.capture.models.symbolic_inputs import symbolic_inputs
from fxpart.capture.symbolic.api import symbolic_graph
from fxpart.capture.training.joint import joint_graph
from fxpart.core.assignment import Assignment
from fxpart.core.graph import IntArray, OpGraph
from fxpart.core.optimizer import Optimizer, with_optimizer
from fxpart.core.partitions import partition_by_device
from fxpart.core.symbolic_graph import SymbolicGraph, on_graph
from fxpart.core.topology import DeviceSpec, Link, Topology, uniform_topology
from fxpart.cost.evaluate import evaluate
from fxpart.cost.evaluation import Evaluation
from fxpart.cost.problem import make_problem
from fxpart.cost.roofline import LatencyModel
from fxpart.cost.symbolic.formula import MaxFormula
from fxpart.cost.symbolic.latency import latency_formula
from fxpart.cost.symbolic.limits import largest_batch
from fxpart.cost.symbolic.peak import peak_formulas
from fxpart.cost.symbolic.sweep import sweep

BATCHES = (1, 2, 3, 4, 8, 16, 64)
SWEPT = tuple({"batch": batch} for batch in range(1, 65))
DEFAULT_MODELS = ("gpt2", "llama", "bert", "resnet50")
PHASES = ("inference", "training")
LATENCY = LatencyModel(compute_efficiency=0.6, bandwidth_efficiency=0.8, op_overhead_s=4e-6)
_RATES = {"float32": 19.5e12, "bfloat16": 312e12}
DEVICE = DeviceSpec("a100_40gb", 40 * 10**9, _RATES, 1.555e12)
LINK = Link(300e9, 5e-6)


@dataclass(frozen=True, eq=False, slots=True)
class _Placed:
    """A symbolic graph on a number of devices, and its formulas."""

    symbolic: SymbolicGraph
    topology: Topology
    assignment: Assignment
    peaks: tuple[MaxFormula, ...]
    latency: MaxFormula


def _arguments() -> argparse.Namespace:
    known = [spec.name for spec in MODELS]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.symbolic", description=__doc__)
    parser.add_argument(
        "--only", nargs="+", choices=known, default=list(DEFAULT_MODELS), metavar="MODEL"
    )
    parser.add_argument("--phases", nargs="+", choices=PHASES, default=list(PHASES))
    return parser.parse_args()


def _symbolic(spec: ModelSpec, phase: str) -> SymbolicGraph:
    inputs = symbolic_inputs(spec)
    symbolic = symbolic_graph(
        inputs.built.module,
        inputs.built.args,
        inputs.built.kwargs,
        dims=inputs.dims,
        phase=phase,
        ranges=inputs.ranges,
    )
    if phase == "inference":
        return symbolic
    return on_graph(symbolic, with_optimizer(symbolic.graph, Optimizer("adam")))


def _capture_at(spec: ModelSpec, phase: str, batch: int) -> OpGraph:
    built = build_model(replace(spec, batch_size=batch))
    if phase == "inference":
        return capture_graph(built.module, built.args, built.kwargs)
    step = joint_graph(built.module, built.args, built.kwargs)
    return with_optimizer(step, Optimizer("adam"))


def _place(symbolic: SymbolicGraph, count: int) -> _Placed:
    """Return the graph in `count` parts of equal size; a backward operator follows its forward."""
    graph = symbolic.graph
    topology = uniform_topology((DEVICE,) * count, LINK)
    device_of = _equal_parts(graph, count)
    assignment = partition_by_device(graph, device_of)
    peaks = peak_formulas(symbolic, assignment, count)
    latency = latency_formula(symbolic, topology, LATENCY, assignment, SWEPT)
    return _Placed(symbolic, topology, assignment, peaks, latency.formula)


def _equal_parts(graph: OpGraph, count: int) -> IntArray:
    device_of = np.arange(graph.n_ops) * count // max(graph.first_backward, 1)
    return np.asarray(device_of[graph.forward_of[graph.group]], dtype=np.int64)


def _common_operators(ours: OpGraph, fresh: OpGraph) -> tuple[IntArray, IntArray]:
    """Return the indices of common operators in each: a capture at one size may lack a view."""
    left, right = (list(zip(g.targets, g.modules, strict=True)) for g in (ours, fresh))
    blocks = SequenceMatcher(None, left, right, autojunk=False).get_matching_blocks()
    a = np.concatenate([np.arange(block.a, block.a + block.size) for block in blocks])
    b = np.concatenate([np.arange(block.b, block.b + block.size) for block in blocks])
    return a.astype(np.int64), b.astype(np.int64)


def _compare_graphs(ours: OpGraph, fresh: OpGraph) -> tuple[str, str]:
    """Return the number of operators that only one has, and of common ones that differ in size."""
    a, b = _common_operators(ours, fresh)
    flops = ours.flops[a] != fresh.flops[b]
    moved = ours.moved_bytes[a] != fresh.moved_bytes[b]
    return str(ours.n_ops + fresh.n_ops - 2 * len(a)), str(np.count_nonzero(flops | moved))


def _evaluate_capture(placed: _Placed, fresh: OpGraph) -> Evaluation:
    """Return the cost of a fresh capture placed the same way; new operators join a neighbour."""
    a, b = _common_operators(placed.symbolic.graph, fresh)
    last = np.maximum(np.searchsorted(b, np.arange(fresh.n_ops), side="right") - 1, 0)
    device_of = placed.assignment.device_of[a[last]][fresh.forward_of[fresh.group]]
    assignment = partition_by_device(fresh, device_of)
    return evaluate(make_problem(fresh, placed.topology, LATENCY), assignment)


def _differences(placed: _Placed, fresh: Evaluation, batch: int) -> tuple[str, str]:
    """Return the errors of the formulas: bytes of the peaks, relative error of the latency."""
    peaks = [int(formula.at(batch=batch)) for formula in placed.peaks]
    peak_error = max(abs(p - use.peak_bytes) for p, use in zip(peaks, fresh.devices, strict=True))
    latency_error = abs(float(placed.latency.at(batch=batch)) / fresh.latency_s - 1)
    return str(peak_error), f"{latency_error:.0e}"


def _rows(spec: ModelSpec, phase: str, placed: list[_Placed]) -> Iterator[list[str]]:
    for batch in BATCHES:
        begin = time.perf_counter()
        fresh = _capture_at(spec, phase, batch)
        capture_s = time.perf_counter() - begin
        ours = placed[0].symbolic.at(batch=batch)
        cells = [str(batch), f"{capture_s:.1f}", *_compare_graphs(ours, fresh)]
        for placement in placed:
            cells += [
                f"{max(int(formula.at(batch=batch)) for formula in placement.peaks) / 1e6:.2f}",
                *_differences(placement, _evaluate_capture(placement, fresh), batch),
            ]
        yield cells


def _report(spec: ModelSpec, phase: str) -> None:
    begin = time.perf_counter()
    symbolic = _symbolic(spec, phase)
    capture_s = time.perf_counter() - begin
    placed = [_place(symbolic, count) for count in (1, 4)]
    sweep(symbolic, placed[1].topology, LATENCY, placed[1].assignment, SWEPT[:1])
    begin = time.perf_counter()
    sweep(symbolic, placed[1].topology, LATENCY, placed[1].assignment, SWEPT)
    sweep_s = time.perf_counter() - begin
    print(
        f"\n{spec.name}, {phase}: {symbolic.graph.n_ops} operators, symbolic capture"
        f" {capture_s:.1f} s, sweep of {len(SWEPT)} batch sizes on 4 devices {sweep_s:.3f} s"
    )
    heads = ["batch", "capture s", "other operators", "other sizes"]
    for count in ("one", "four"):
        heads += [f"{count}: peak MB", "error B", "latency error"]
    print(table(heads, _rows(spec, phase, placed)))
    (peak,) = placed[0].peaks
    print(f"peak bytes on one device = {peak.text()}")
    print(f"largest batch on one {DEVICE.name}: {largest_batch([peak], DEVICE.memory_bytes):,}")
    print(f"seconds on one device = {placed[0].latency.text()}", flush=True)


def main() -> None:
    """Print a block for each model and phase."""
    chosen = _arguments()
    for spec in MODELS:
        if spec.name in chosen.only:
            for phase in chosen.phases:
                _report(spec, phase)


if __name__ == "__main__":
    main()
