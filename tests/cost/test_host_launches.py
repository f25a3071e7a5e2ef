"""The host launches operators one by one, and faster devices wait for it."""

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.synthetic import synthetic_graph
from fxpart.core.partitions import partition_by_device
from fxpart.core.topology import DeviceSpec, Link, Topology, uniform_topology
from fxpart.cost.bounds import lower_bound_s
from fxpart.cost.evaluate import evaluate
from fxpart.cost.incremental import estimate, make_progress, refresh
from fxpart.cost.problem import Problem, make_problem
from fxpart.cost.roofline import LatencyModel
from fxpart.errors import SpecError
from fxpart.schedule import stage_costs

_LAUNCH_S = 50e-6


def _topology(devices: int, launch_s: float, flops_per_s: float = 1e12) -> Topology:
    spec = DeviceSpec("d", 2**50, {"float32": flops_per_s}, flops_per_s / 10)
    return replace(uniform_topology((spec,) * devices, Link(1e10, 1e-6)), host_launch_s=launch_s)


def _problem(devices: int = 2, launch_s: float = _LAUNCH_S, flops_per_s: float = 1e12) -> Problem:
    graph = synthetic_graph(120, 0)
    return make_problem(graph, _topology(devices, launch_s, flops_per_s), LatencyModel())


def _simulated_s(problem: Problem, device_of: np.ndarray) -> float:
    """Simulate the same by events, in the most direct way."""
    graph, costs = problem.graph, problem.costs
    host_s = 0.0
    finish_s: dict[int, float] = {}
    sent_s: dict[tuple[int, int], float] = {}
    device_s: dict[int, float] = {}
    link_s: dict[tuple[int, int], float] = {}
    for op in range(graph.n_ops):
        here = int(device_of[op])
        if graph.flops[op] > 0 or graph.moved_bytes[op] > 0:
            host_s += problem.topology.host_launch_s
        start_s = max(host_s, device_s.get(here, 0.0))
        for value in graph.reads_of(op).tolist():
            maker = int(graph.value_producer[value])
            if maker >= 0:
                away = int(device_of[maker]) != here
                start_s = max(start_s, sent_s[value, here] if away else finish_s[maker])
        finish_s[op] = device_s[here] = start_s + float(costs.op_time_s[op, here])
        for value in np.flatnonzero(graph.value_producer == op).tolist():
            for reader in np.flatnonzero([value in graph.reads_of(o) for o in range(graph.n_ops)]):
                target = int(device_of[reader])
                if target == here or (value, target) in sent_s:
                    continue
                begin_s = max(finish_s[op], link_s.get((here, target), 0.0))
                taken_s = 1e-6 + float(graph.value_bytes[value]) / 1e10
                sent_s[value, target] = link_s[here, target] = begin_s + taken_s
    return max(finish_s.values())


@pytest.mark.parametrize("flops_per_s", [1e9, 1e11, 1e19])
def test_an_operator_begins_when_the_host_has_launched_it(flops_per_s: float) -> None:
    problem = _problem(flops_per_s=flops_per_s)
    device_of = np.arange(problem.graph.n_ops) // 40 % 2
    evaluation = evaluate(problem, partition_by_device(problem.graph, device_of))
    assert evaluation.latency_s == pytest.approx(_simulated_s(problem, device_of), rel=1e-12)
    assert evaluation.latency_s >= evaluation.lower_bound_s * (1 - 1e-12)
    assert evaluation.latency_s >= evaluation.critical_path_s * (1 - 1e-12)


def test_a_model_of_small_operators_takes_the_time_of_the_host() -> None:
    problem, fast = _problem(1, flops_per_s=1e19), _problem(1, 0.0, 1e19)
    graph = problem.graph
    started = int(((graph.flops > 0) | (graph.moved_bytes > 0)).sum())
    evaluation = evaluate(
        problem, partition_by_device(graph, np.zeros(graph.n_ops, dtype=np.int64))
    )
    assert evaluation.latency_s == pytest.approx(started * _LAUNCH_S, rel=1e-3)
    assert evaluation.throughput_per_s == pytest.approx(1 / (started * _LAUNCH_S))
    assert lower_bound_s(problem) == evaluation.latency_s
    assert lower_bound_s(fast) < evaluation.latency_s / 50


@pytest.mark.parametrize("launch_s", [20e-6, 1e-3])
def test_an_estimate_includes_the_host(launch_s: float) -> None:
    problem = _problem(3, launch_s, 1e19)
    rng, n = np.random.default_rng(0), problem.graph.n_ops
    device_of = rng.integers(0, 3, n)
    progress = make_progress(problem.costs)
    before_s = refresh(problem.costs, device_of, progress)
    assert estimate(problem.costs, device_of, progress, 50, 60)[0] == pytest.approx(before_s)
    for first in range(0, n - 3, 9):
        changed = device_of.copy()
        changed[first : first + 3] = (changed[first : first + 3] + 1) % 3
        placed = partition_by_device(problem.graph, changed)
        exact = evaluate(problem, placed, search_bounds=False).latency_s
        about = estimate(problem.costs, changed, progress, first, first + 2)[0]
        assert about >= float(problem.costs.issue_s[-1])
        assert about == pytest.approx(exact, rel=0.02)


def test_the_process_of_a_stage_launches_only_its_operators() -> None:
    problem = _problem(2, flops_per_s=1e19)
    device_of = (np.arange(problem.graph.n_ops) >= 60).astype(np.int64)
    costs = stage_costs(problem, partition_by_device(problem.graph, device_of))
    graph = problem.graph
    started = (graph.flops > 0) | (graph.moved_bytes > 0)
    expected = [float(started[part].sum()) * _LAUNCH_S for part in (slice(0, 60), slice(60, None))]
    assert [stage.forward_s for stage in costs.stages] == pytest.approx(expected)


def test_a_negative_time_is_refused() -> None:
    with pytest.raises(SpecError, match=r"runtime\.host_launch_s must be at least 0"):
        _topology(1, -1e-6)
