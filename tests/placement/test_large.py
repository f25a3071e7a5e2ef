"""The contract of the searching modes on their other code paths: several windows, large models."""

import numpy as np
import pytest

import fxpart.placement.search.refine
import fxpart.placement.search.steady
from fxpart.core.graph import IntArray
from fxpart.core.topology import Link
from fxpart.cost.evaluate import evaluate
from fxpart.cost.problem import Problem
from fxpart.placement import make_mode
from fxpart.placement.search.local_search import SearchTables, improve
from fxpart.placement.search.refine import (
    SMALL,
    SearchOptions,
    combine,
    latency_of,
    refine,
    search_tables,
)
from fxpart.placement.search.units import Units
from fxpart.placement.size_based import size_based
from tests import independent
from tests.sketch import Sketch, devices, problem, random_graph


def _problem(seed: int, n: int) -> Problem:
    graph = random_graph(seed, n)
    whole = independent.peak_bytes(graph, np.zeros(n, dtype=np.int64), 0)
    return problem(graph, devices(*[int(whole * 0.6)] * 3, link=Link(8.0, 0.125)))


@pytest.mark.parametrize("mode", ["kl_based", "cost_aware"])
@pytest.mark.parametrize("way", ["usual", "large"])
@pytest.mark.parametrize("n", [300, SMALL + 8])
def test_the_contract_holds_in_larger_graphs(
    mode: str, way: str, n: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if way == "large":
        monkeypatch.setattr(fxpart.placement.search.refine, "LARGE", 100)
        monkeypatch.setattr(fxpart.placement.search.refine, "SMALL", 0)
    this = _problem(n, n)
    placed = make_mode(mode)(this)
    device_of = placed.device_of
    for device, spec in enumerate(this.topology.devices):
        assert independent.peak_bytes(this.graph, device_of, device) <= spec.memory_bytes
    assert np.array_equal(device_of, device_of[this.graph.group])
    latency_s = evaluate(this, placed).latency_s
    assert latency_s == pytest.approx(independent.latency_s(this, device_of))
    assert latency_s <= latency_of(this, size_based(this).device_of)


def test_larger_models_are_kicked_by_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    this = _problem(600, SMALL + 8)
    kicked_s = latency_of(this, make_mode("kl_based")(this).device_of)
    monkeypatch.setattr(fxpart.placement.search.refine, "_KICKS_BY_OPERATORS", 0)
    assert kicked_s < latency_of(this, make_mode("kl_based")(this).device_of)


def test_small_models_are_annealed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fxpart.placement.search.steady, "_FEW_SUBSETS", 0)
    this = _problem(100, 100)
    annealed_s = latency_of(this, make_mode("kl_based")(this).device_of)
    monkeypatch.setattr(fxpart.placement.search.refine, "_STEPS_AN_OPERATOR", 1)
    assert annealed_s < latency_of(this, make_mode("kl_based")(this).device_of)


def test_a_large_model_is_searched_finely_from_one_start(monkeypatch: pytest.MonkeyPatch) -> None:
    searched: list[int] = []

    def counted(tables: SearchTables, device_of: IntArray, units: Units, passes: int) -> float:
        searched.append(len(units[0]) - 1)
        return improve(tables, device_of, units, passes)

    monkeypatch.setattr(fxpart.placement.search.refine, "LARGE", 100)
    monkeypatch.setattr(fxpart.placement.search.refine, "SMALL", 0)
    monkeypatch.setattr(fxpart.placement.search.refine, "_COARSE", 4)
    monkeypatch.setattr(fxpart.placement.search.refine, "improve", counted)
    this = problem(random_graph(150, 150), devices(9999, 9999))
    refine(this, [np.zeros(150, dtype=np.int64), np.ones(150, dtype=np.int64)], SearchOptions())
    # After modules, and after chains; coarse modules from both.
    assert searched.count(max(searched)) == 2
    assert searched.count(min(searched)) == 2


@pytest.mark.parametrize("min_gain", [0.0, 1e-4, 0.01, 0.05])
def test_the_cost_of_merging_is_bounded(min_gain: float) -> None:
    """Twenty diamonds over two devices: each partition saves a few per cent, no more is lost."""
    sketch = Sketch()
    value = sketch.op([], 1, flops=1)
    device_of = [0]
    for _ in range(20):
        left, right = sketch.op([value], 1, flops=20), sketch.op([value], 1, flops=20)
        value = sketch.op([left, right], 1, flops=1)
        device_of += [0, 1, 0]
    this = problem(sketch.graph(value), devices(9999, 9999))
    moved = np.array(device_of, dtype=np.int64)
    before = latency_of(this, moved)
    joins = combine(this.graph, search_tables(this, SearchOptions(min_gain=min_gain)), moved)
    after = latency_of(this, moved)
    assert after <= before * (1 + (min_gain + 1e-9) * joins)
    if min_gain < 0.01:
        # A diamond saves 18 of about 480 seconds: it is worth its partition.
        assert (joins, after) == (0, before)
    if min_gain == 0.05:
        assert len(set(moved.tolist())) == 1
