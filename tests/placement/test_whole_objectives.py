"""`objective=memory` and `objective=energy`, against brute force."""

import itertools
from dataclasses import replace

import numpy as np
import pytest

import fxpart.cost.least_placement
import fxpart.placement.search.steady
from fxpart.core.assignment import Assignment
from fxpart.core.graph import IntArray, OpGraph
from fxpart.core.topology import Link
from fxpart.cost.bounds import lower_bound_s
from fxpart.cost.energy import IDLE_SHARE
from fxpart.cost.problem import OBJECTIVES, Problem, make_problem
from fxpart.cost.roofline import LatencyModel
from fxpart.errors import SpecError
from fxpart.placement import make_mode
from fxpart.placement.optimal.model_search import ModelSearch
from fxpart.placement.search.full_evaluations import BY_WHOLE, bound_of, value_of
from fxpart.placement.search.steady import steadily
from tests import independent
from tests.sketch import Sketch, chain, devices, problem, random_graph

POWERS = (10.0, 30.0, 100.0)
MODES: dict[str, dict[str, object]] = {"kl_based": {}, "cost_aware": {}, "optimal": {"steps": 8}}


def _problem(seed: int, objective: str, n: int = 6) -> Problem:
    topology = (1.0, 2.0, 4.0), Link(4.0, 0.1)
    return _on_three(random_graph(seed, n), objective, (0.9, 0.7, 0.6), *topology)


def _on_three(
    graph: OpGraph,
    objective: str,
    shares: tuple[float, ...],
    speeds: tuple[float, ...],
    link: Link,
) -> Problem:
    whole = independent.peak_bytes(graph, np.zeros(graph.n_ops, dtype=np.int64), 0)
    sizes = [int(whole * share) for share in shares]
    topology = devices(*sizes, speeds=list(speeds), link=link)
    powered = tuple(
        replace(device, power_w=power)
        for device, power in zip(topology.devices, POWERS, strict=True)
    )
    return make_problem(graph, replace(topology, devices=powered), LatencyModel(), objective)


def _cost(this: Problem, device_of: IntArray) -> float:
    """Return the bytes of the fullest device, or the energy, as defined in the docs."""
    if this.objective == "memory":
        return max(independent.peak_bytes(this.graph, device_of, d) for d in range(3))
    latency_s, total = independent.latency_s(this, device_of), 0.0
    for device in set(device_of.tolist()):
        busy_s = sum(this.costs.op_time_s[op, device] for op in np.flatnonzero(device_of == device))
        total += POWERS[device] * (busy_s + IDLE_SHARE * (latency_s - busy_s))
    return total


def _fits(this: Problem, device_of: IntArray) -> bool:
    return bool((device_of == device_of[this.graph.group]).all()) and all(
        independent.peak_bytes(this.graph, device_of, device) <= spec.memory_bytes
        for device, spec in enumerate(this.topology.devices)
    )


@pytest.mark.parametrize("objective", ["memory", "energy"])
def test_searches_equal_brute_force(objective: str) -> None:
    tried = 0
    for seed in range(4):
        this = _problem(seed, objective)
        every = (np.array(p, dtype=np.int64) for p in itertools.product(range(3), repeat=6))
        costs = [_cost(this, p) for p in every if _fits(this, p)]
        if not costs:
            continue
        tried += 1
        bound, _ = bound_of(this, lower_bound_s(this))
        assert 0 < bound <= min(costs) * (1 + 1e-9)
        for mode, options in MODES.items():
            device_of = make_mode(mode, options)(this).device_of
            assert _fits(this, device_of)
            assert _cost(this, device_of) == pytest.approx(min(costs), rel=1e-9)
            assert value_of(this, device_of) == pytest.approx(_cost(this, device_of), rel=1e-9)
    assert tried >= 3


def test_the_memory_bound_counts_what_must_be_together() -> None:
    """Two of three equal weights share a device; one operator reads 50 bytes and produces 40."""
    for makes, known in (((1, 1), (20.0, "weights")), ((50, 40), (100.0, "one operator"))):
        sketch = Sketch()
        value = sketch.op([sketch.input(1)], 1, [sketch.weight(10)], 1)
        for size in makes:
            value = sketch.op([value], size, [sketch.weight(10)], 1)
        this = problem(sketch.graph(value), devices(500, 500))
        assert bound_of(replace(this, objective="memory"), 0.0) == known


@pytest.mark.parametrize("objective", ["memory", "energy"])
def test_larger_models_are_searched_too(objective: str) -> None:
    this = _problem(5, objective, 40)
    latency = replace(this, objective="latency")
    for mode in ("kl_based", "cost_aware"):
        device_of = make_mode(mode)(this).device_of
        assert _fits(this, device_of)
        fastest = make_mode(mode)(latency).device_of
        assert _cost(this, device_of) < _cost(this, fastest)
        assert np.array_equal(device_of, make_mode(mode)(this).device_of)


def _in_modules(seed: int) -> OpGraph:
    """Return 24 operators in modules of eight, each with four modules of two."""
    random, sketch = np.random.default_rng(seed), Sketch()
    values = [sketch.input(4)]
    for op in range(24):
        reads = [values[-1]]
        if random.random() < 0.4:
            reads.append(values[int(random.integers(0, len(values)))])
        makes, weight, flops = (int(random.integers(1, most)) for most in (40, 60, 50))
        module = f"layers.{op // 8}.sub{op // 2 % 4}"
        values.append(sketch.op(reads, makes, [sketch.weight(weight)], flops, module=module))
    return sketch.graph(values[-1])


def test_modules_split_over_several_devices_move_if_they_fit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fxpart.cost.least_placement, "_MOST_WORK", 2_000_000)
    monkeypatch.setattr(fxpart.placement.search.steady, "_FEW_SUBSETS", 0)
    for seed in (2, 5):
        speeds, shares = (4.0, 2.0, 1.0), (0.45, 0.5, 0.45)
        this = _on_three(_in_modules(seed), "energy", shares, speeds, Link(40.0, 0.01))
        for mode in ("kl_based", "cost_aware"):
            fastest = make_mode(mode)(replace(this, objective="latency")).device_of
            device_of = make_mode(mode)(this).device_of
            assert _fits(this, device_of)
            assert _cost(this, device_of) <= _cost(this, fastest) * (1 + 1e-9)


def test_the_best_plan_for_latency_is_not_used_for_another_objective() -> None:
    for objective in OBJECTIVES:
        small, asked = _problem(0, objective), list[Problem]()

        def start(some: Problem, asked: list[Problem] = asked) -> Assignment:
            asked.append(some)
            return make_mode("size_based")(some)

        ModelSearch(small, [start]).round()
        assert bool(asked) == (objective in BY_WHOLE)
        asked.clear()
        steadily(_problem(5, objective, 60), start)
        # Fewer devices are tried if the fastest plan is the objective.
        assert (len(asked) > 1) == (objective == "latency")


def test_energy_of_devices_without_a_power_is_refused() -> None:
    with pytest.raises(SpecError, match="needs the power of each device, d0, d1 has none"):
        make_problem(chain(2), devices(100, 100), LatencyModel(), "energy")
