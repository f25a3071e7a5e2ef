"""`pipeline` on unlike devices: the orders that it tries, and what another device costs."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fxpart.core.graph import OpGraph
from fxpart.core.topology import Link
from fxpart.cost.evaluate import evaluate
from fxpart.cost.problem import Problem
from fxpart.errors import InfeasibleError
from fxpart.placement import make_mode
from fxpart.placement.device_order import on_devices, orders_of_kinds, speed_order
from fxpart.placement.stages.line import stage_line
from fxpart.schedule.from_assignment import stage_costs
from fxpart.schedule.simulate import simulate_schedule
from tests import independent
from tests.sketch import Sketch, chain, devices, problem, random_graph

FAST = Link(1e12)


def _language_model() -> OpGraph:
    """Return a large embedding that takes no time, layers, and a large head that takes long."""
    sketch = Sketch()
    value = sketch.op([sketch.input(0)], 1, [sketch.weight(100)], flops=0)
    for _ in range(4):
        value = sketch.op([value], 1, [sketch.weight(40)], flops=10)
    return sketch.graph(sketch.op([value], 1, [sketch.weight(100)], flops=20))


def _unlike(seed: int, n: int, kinds: list[int]) -> Problem:
    """Return a random graph on some devices of each kind, in a random order."""
    rng = np.random.default_rng(seed)
    graph = random_graph(seed, n)
    whole = independent.peak_bytes(graph, np.zeros(graph.n_ops, dtype=np.int64), 0)
    sizes, speeds = list[int](), list[float]()
    for count in kinds:
        sizes += [max(1, int(whole * rng.uniform(0.2, 2.0)))] * count
        speeds += [float(rng.choice([0.25, 0.5, 1.0, 2.0]))] * count
    order = rng.permutation(len(sizes)).tolist()
    topology = devices(
        *(sizes[d] for d in order), speeds=[speeds[d] for d in order], link=Link(1e9)
    )
    return problem(graph, topology)


def _load_s(this: Problem, options: dict[str, object] | None = None) -> float:
    """Return the largest load of a device; infinite if nothing fits."""
    try:
        placed = make_mode("pipeline", {"boundary_gain": None, **(options or {})})(this)
    except InfeasibleError:
        return float("inf")
    times = this.costs.op_time_s[np.arange(this.graph.n_ops), placed.device_of]
    return float(np.bincount(placed.device_of, weights=times).max())


@pytest.mark.parametrize("written", [(0, 1, 2, 3), (3, 2, 1, 0), (1, 0, 3, 2)])
def test_a_slow_device_takes_the_cheap_begin(written: tuple[int, ...]) -> None:
    topology = devices(130, 130, 130, 999, speeds=[1.0, 1.0, 1.0, 0.1], link=FAST)
    this = on_devices(problem(_language_model(), topology), written)
    placed = make_mode("pipeline")(this)
    assert placed.partition_of.tolist() == [0, 1, 1, 2, 2, 3]
    # The head would take ten times as long on the slow device.
    assert written[placed.devices_of_partition[0][0]] == 3
    assert evaluate(this, placed).load_s == pytest.approx(20)


def test_another_device_is_not_used_if_it_reduces_no_load() -> None:
    graph = _language_model()
    three = problem(graph, devices(*[200] * 3, link=Link(1.0)))
    four = problem(graph, devices(*[200] * 4, link=Link(1.0)))
    plans = [make_mode("pipeline")(this) for this in (three, four)]
    assert plans[1].partition_of.tolist() == plans[0].partition_of.tolist()
    assert plans[1].devices_of_partition == plans[0].devices_of_partition
    assert evaluate(four, plans[1]).latency_s == evaluate(three, plans[0]).latency_s


@settings(max_examples=25)
@given(st.integers(0, 10_000), st.integers(2, 14), st.lists(st.integers(1, 2), max_size=2))
def test_the_best_of_all_orders_of_a_few_devices(seed: int, n: int, more: list[int]) -> None:
    this = _unlike(seed, n, [1, *more])
    count = this.topology.n_devices
    by_hand = [
        _load_s(on_devices(this, order), {"stages": used})
        for used in range(1, min(count, stage_line(this).n_units) + 1)
        for order in itertools.permutations(range(count), used)
    ]
    assert _load_s(this) == pytest.approx(min(by_hand))


@settings(max_examples=25)
@given(
    st.integers(0, 10_000),
    st.integers(2, 20),
    st.lists(st.integers(1, 4), min_size=1, max_size=4),
)
def test_any_order_written_gives_equal_loads(seed: int, n: int, kinds: list[int]) -> None:
    this = _unlike(seed, n, kinds)
    other = np.random.default_rng(seed + 1).permutation(this.topology.n_devices).tolist()
    assert _load_s(on_devices(this, other)) == pytest.approx(_load_s(this), rel=1e-8)


@given(
    st.integers(0, 10_000),
    st.lists(st.integers(1, 12), min_size=1, max_size=9),
)
def test_orders_are_few_distinct_and_begin_with_the_fastest(seed: int, kinds: list[int]) -> None:
    this = _unlike(seed, 5, kinds)
    orders = orders_of_kinds(this)
    assert orders[0] == speed_order(this)
    assert len(set(map(tuple, orders))) == len(orders) <= 24
    assert all(sorted(order) == list(range(this.topology.n_devices)) for order in orders)


def test_orders_of_two_and_of_many_devices() -> None:
    two = problem(chain(3), devices(9, 9, 9, speeds=[1.0, 2.0, 1.0]))
    assert orders_of_kinds(two) == [[1, 0, 2], [0, 1, 2], [0, 2, 1]]
    many = problem(chain(3), devices(*[9] * 8, speeds=[2.0] * 4 + [1.0] * 4))
    fast, slow = [0, 1, 2, 3], [4, 5, 6, 7]
    assert orders_of_kinds(many) == [
        fast + slow,
        slow + fast,
        [7, *fast, 4, 5, 6],
        [3, 0, 1, 2, *slow],
        [0, 1, 2, *slow, 3],
    ]


def test_a_slow_device_in_front_shortens_the_step() -> None:
    topology = devices(130, 130, 130, 999, speeds=[1.0, 1.0, 1.0, 0.1], link=FAST)
    this = problem(_language_model(), topology)
    placed = make_mode("pipeline", {"schedule": "gpipe", "microbatches": 8})(this)
    step_s = simulate_schedule("gpipe", stage_costs(this, placed), 8).step_s
    # Three stages of 20 s; 200 s each for the head on the slow device.
    assert step_s == pytest.approx(20 * (8 + 2), rel=1e-3)


def test_many_equal_devices_have_one_order() -> None:
    many = problem(chain(8), devices(*[10**6] * 1024))
    assert orders_of_kinds(many) == [list(range(1024))]
