"""`cost_aware` and its parts: list scheduling, pairs, combination."""

import contextlib
import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxpart.core.graph import IntArray, OpGraph
from fxpart.core.partitions import partition_by_device
from fxpart.core.topology import Link
from fxpart.cost.evaluate import evaluate, peak_bytes
from fxpart.cost.problem import Problem
from fxpart.errors import InfeasibleError
from fxpart.placement.cost_aware import cost_aware
from fxpart.placement.search.list_scheduling import list_placement
from fxpart.placement.search.pairwise import combine_pairs
from fxpart.placement.search.refine import SearchOptions, combine, latency_of, search_tables
from fxpart.placement.size_based import size_based
from tests.sketch import Sketch, chain, devices, problem, random_graph


def _fork(left: int, right: int, size: int) -> OpGraph:
    """Return two operators after one, and one after both."""
    sketch = Sketch()
    top = sketch.op([], size, flops=1)
    a = sketch.op([top], size, flops=left)
    b = sketch.op([top], size, flops=right)
    return sketch.graph(sketch.op([a, b], 1, flops=1))


def _tight(seed: int, n: int, share: float) -> Problem:
    graph = random_graph(seed, n)
    whole = int(peak_bytes(problem(graph, devices(1)).memory, np.zeros(n, dtype=np.int64), 1)[0])
    rng = np.random.default_rng(seed)
    sizes = [max(1, int(whole * share * rng.uniform(0.7, 1.3) / 3)) for _ in range(3)]
    return problem(graph, devices(*sizes, link=Link(4.0, 0.125)))


def _least(this: Problem) -> float:
    """Return the lowest latency of all placements that fit, by trying them all."""
    n, count = this.graph.n_ops, this.topology.n_devices
    best = np.inf
    for tried in itertools.product(range(count), repeat=n):
        device_of = np.array(tried, dtype=np.int64)
        together = np.array_equal(device_of, device_of[this.graph.group])
        if (
            together
            and (peak_bytes(this.memory, device_of, count) <= this.topology.memory_bytes).all()
        ):
            best = min(best, latency_of(this, device_of))
    return float(best)


def test_branches_run_in_parallel_over_a_fast_link() -> None:
    # One device: 1 + 5 + 5 + 1. Two: 1, then 5 + 0.5 beside 0.5 + 5, then 1 where the later ran.
    this = problem(_fork(5, 5, 1), devices(99, 99, link=Link(2.0)))
    placed = cost_aware(this)
    assert evaluate(this, placed).latency_s == 7.5


def test_branches_stay_together_over_a_slow_link() -> None:
    this = problem(_fork(5, 5, 16), devices(99, 99, link=Link(2.0)))
    placed = cost_aware(this)
    assert evaluate(this, placed).latency_s == 12.0
    assert placed.n_partitions == 1


def test_list_scheduling_uses_the_fast_device_until_it_is_full() -> None:
    graph = chain(6, weight=10, size=0, flops=4)
    fast_second = devices(1000, 1000, link=Link(8.0), speeds=[1.0, 4.0])
    whole = list_placement(problem(graph, fast_second))
    assert whole is not None
    assert whole.tolist() == [1] * 6
    half = devices(1000, 30, link=Link(8.0), speeds=[1.0, 4.0])
    placed = list_placement(problem(graph, half))
    assert placed is not None
    assert placed.tolist() == [1, 1, 1, 0, 0, 0]


def test_list_scheduling_finds_no_plan_without_enough_memory() -> None:
    assert list_placement(problem(chain(6, weight=10), devices(25, 25))) is None


def test_pairs_by_hand() -> None:
    """A chain over two equal devices: all is merged, as a transfer only costs."""
    this = problem(chain(5, weight=10, size=1, flops=1), devices(99, 99))
    combined = combine_pairs(this)
    assert combined is not None
    assert len(set(combined.tolist())) == 1


@given(
    seed=st.integers(0, 5_000), n=st.integers(2, 20), share=st.sampled_from([0.9, 1.2, 2.0, 4.0])
)
def test_the_result_is_never_slower_than_pairs_or_size_based(
    seed: int, n: int, share: float
) -> None:
    this = _tight(seed, n, share)
    combined = combine_pairs(this)
    starts: list[IntArray] = [] if combined is None else [combined]
    with contextlib.suppress(InfeasibleError):
        starts.append(size_based(this).device_of)
    if not starts:
        return
    latency_s = evaluate(this, cost_aware(this), search_bounds=False).latency_s
    assert latency_s <= min(latency_of(this, s) for s in starts) * (1 + 1e-12)


def test_small_graphs_are_close_to_the_optimum() -> None:
    ratios = []
    for seed in range(40):
        this = _tight(seed, 6, 3.0)
        best = _least(this)
        if 0 < best < np.inf:
            latency_s = evaluate(this, cost_aware(this), search_bounds=False).latency_s
            ratios.append(latency_s / best)
    assert min(ratios) >= 1 - 1e-12
    assert np.median(ratios) == pytest.approx(1.0)
    assert max(ratios) < 1.2


@pytest.mark.parametrize(("seed", "n"), [(249, 20), (84, 17), (121, 18)])
def test_another_start_is_tried_if_size_based_finds_none(seed: int, n: int) -> None:
    this = _tight(seed, n, 1.2)
    with pytest.raises(InfeasibleError):
        size_based(this)
    peaks = peak_bytes(this.memory, cost_aware(this).device_of, 3)
    assert (peaks <= this.topology.memory_bytes).all()


def test_an_infeasible_problem_is_an_error() -> None:
    with pytest.raises(InfeasibleError, match="the smallest number of such devices"):
        cost_aware(problem(chain(8, weight=10), devices(25, 25)))


@given(seed=st.integers(0, 5_000), n=st.integers(2, 60))
def test_merging_neither_slows_nor_divides_nor_overfills(seed: int, n: int) -> None:
    this = _tight(seed, n, 3.0)
    rng = np.random.default_rng(seed)
    device_of = rng.integers(0, 3, size=n)[this.graph.group]
    if (peak_bytes(this.memory, device_of, 3) > this.topology.memory_bytes).any():
        return
    before = latency_of(this, device_of)
    moved = device_of.copy()
    combine(this.graph, search_tables(this, SearchOptions(min_gain=0.0)), moved)
    assert latency_of(this, moved) <= before * (1 + 1e-6)
    assert (moved == moved[this.graph.group]).all()
    assert (peak_bytes(this.memory, moved, 3) <= this.topology.memory_bytes).all()


def test_merging_moves_a_branch_home_that_nothing_waits_for() -> None:
    # A side branch on the other device that ends long before it is needed.
    sketch = Sketch()
    top = sketch.op([], 1, flops=1)
    side = sketch.op([top], 1, flops=0)
    main = sketch.op([top], 1, flops=9)
    this = problem(sketch.graph(sketch.op([main, side], 1, flops=1)), devices(99, 99))
    device_of = np.array([0, 1, 0, 0])
    assert partition_by_device(this.graph, device_of).n_partitions == 3
    combine(this.graph, search_tables(this, SearchOptions()), device_of)
    assert device_of.tolist() == [0, 0, 0, 0]
