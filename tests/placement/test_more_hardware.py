"""More hardware never makes a plan worse, and the order of devices does not matter."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.monotone import Scene, cost_s, random_rows, verdicts
from fxpart import DeviceSpec, LatencyModel, Link, evaluate, make_mode
from fxpart.core.assignment import Assignment
from fxpart.core.graph import OpGraph
from fxpart.core.topology import uniform_topology
from fxpart.cost.device_kinds import device_kinds
from fxpart.cost.problem import Problem, make_problem
from fxpart.placement.device_order import choices_of_devices, fastest_first, useful_devices
from tests import independent
from tests.sketch import Sketch, chain, devices, problem, random_graph

MODES = ("single", "size_based", "kl_based", "cost_aware", "pipeline")
ROUNDING = 1e-10


@dataclass(frozen=True)
class _Kind:
    share: float
    speed: float


KINDS = st.builds(_Kind, st.sampled_from([0.4, 0.7, 1.1, 3.0]), st.sampled_from([1.0, 2.0, 8.0]))


def _scene(seed: int, n: int, kinds: list[_Kind], rate: float) -> Scene:
    graph = random_graph(seed, n)
    return Scene(graph, tuple(_device(graph, kind) for kind in kinds), Link(rate, 0.1), _MODEL)


_MODEL = LatencyModel()


def _device(graph: OpGraph, kind: _Kind) -> DeviceSpec:
    whole = independent.peak_bytes(graph, np.zeros(graph.n_ops, dtype=np.int64), 0)
    memory_bytes = max(1, int(whole * kind.share))
    return DeviceSpec(f"d{kind.share}x{kind.speed}", memory_bytes, {"float32": kind.speed}, 1e3)


@pytest.mark.parametrize("mode", MODES)
@settings(max_examples=25)
@given(
    seed=st.integers(0, 10_000),
    n=st.integers(2, 14),
    kinds=st.lists(KINDS, min_size=1, max_size=3),
    further=KINDS,
    rate=st.sampled_from([0.5, 4.0, 50.0]),
    data=st.data(),
)
def test_more_hardware_never_makes_a_plan_worse(  # noqa: PLR0917 - drawn by position
    mode: str,
    seed: int,
    n: int,
    kinds: list[_Kind],
    further: _Kind,
    rate: float,
    data: st.DataObject,
) -> None:
    scene = _scene(seed, n, kinds, rate)
    before_s = scene.cost_s(mode)
    most_s = before_s * (1 + ROUNDING)
    position = data.draw(st.integers(0, len(kinds)))
    extended = (*scene.devices[:position], _device(scene.graph, further), *scene.devices[position:])
    assert replace(scene, devices=extended).cost_s(mode) <= most_s
    faster = replace(scene, link=Link(2 * rate, 0.05))
    assert faster.cost_s(mode) <= most_s
    other = data.draw(st.permutations(scene.devices))
    assert replace(scene, devices=tuple(other)).cost_s(mode) == pytest.approx(before_s, rel=0.01)


def test_a_worse_plan_is_counted_by_the_benchmark() -> None:
    assert verdicts("device", 1.0, 1.02) == ["device", "device worse", "device by 1 %"]
    assert verdicts("link", 1.0, 0.5) == ["link"]
    assert verdicts("order", 1.0, 0.98) == ["order", "order worse", "order by 1 %"]
    assert verdicts("device", 1.0, float("inf")) == ["device", "device worse", "device by 1 %"]
    assert verdicts("device", float("inf"), 1.0) == []


def test_random_problems_are_counted_for_each_mode() -> None:
    counts = random_rows(range(3), ("single", "size_based"))
    assert counts["size_based"]["device"] > 0
    assert counts["size_based"]["device worse"] == counts["size_based"]["order worse"] == 0


def test_devices_are_equal_by_memory_speed_and_links() -> None:
    nodes, speeds = [0, 0, 1, 1, 0], [1.0, 1.0, 1.0, 1.0, 2.0]
    topology = devices(9, 9, 9, 9, 9, nodes=nodes, speeds=speeds, far=Link(0.5))
    graph = random_graph(0, 5)
    assert device_kinds(problem(graph, topology)).tolist() == [0, 0, 2, 2, 4]


def test_devices_of_a_node_are_adjacent_in_any_order() -> None:
    orders: list[list[int]] = []

    @fastest_first
    def place(this: Problem) -> Assignment:
        orders.append(this.topology.bytes_per_s[0, 1:].tolist())
        return Assignment(np.zeros(this.graph.n_ops, dtype=np.int64), ((0,),))

    fast, slow = Link(4.0), Link(0.5)
    for nodes in ([0, 0, 1, 1], [0, 1, 0, 1], [1, 0, 0, 1]):
        place(problem(random_graph(0, 5), devices(*[9] * 4, nodes=nodes, link=fast, far=slow)))
    assert orders == [[4.0, 0.5, 0.5]] * 3


def test_choices_drop_one_more_device_of_each_kind() -> None:
    this = problem(random_graph(0, 5), devices(10**6, 10**6, 10**5))
    chosen: list[list[int]] = []
    choices_of_devices(this, lambda devices: chosen.append(devices.tolist()), max_subsets=9)
    assert chosen == [[0, 1, 2], [0, 2], [0, 1], [2], [0]]


def test_a_pipeline_is_never_worse_than_one_device_over_a_slow_link() -> None:
    graph = random_graph(3, 20)
    device = DeviceSpec("any", 10**6, {"float32": 1.0}, 1e3)
    times = []
    for count in (1, 2, 4):
        topology = uniform_topology((device,) * count, Link(0.01))
        times.append(cost_s(make_problem(graph, topology, _MODEL), "pipeline"))
    assert times[2] <= times[1] <= times[0]


def test_no_more_equal_nodes_than_operators_are_searched() -> None:
    nodes = [0, 0, 1, 1, 2, 2, 2, 3, 3, 4, 4]
    this = problem(chain(2), devices(*[9] * 11, nodes=nodes, far=Link(0.5)))
    assert useful_devices(this).tolist() == [0, 1, 2, 3, 4, 5]


def test_links_that_a_plan_does_not_wait_for_are_not_slowed_down() -> None:
    sketch = Sketch()
    ends = [sketch.input(1) for _ in range(3)]
    for tower in range(3):
        for layer in range(30):
            module = f"{tower}.{layer}"
            ends[tower] = sketch.op([ends[tower]], 10, [sketch.weight(10)], 1000, module=module)
    two = devices(10**6, 10**6, link=Link(1e3, 1e-3), rate=1e6)
    this = problem(sketch.graph(*ends), two)
    placed = make_mode("kl_based")(this)
    # No tower has to wait for another.
    on_first = (placed.device_of == placed.device_of[0]).sum()
    assert evaluate(this, placed).latency_s == pytest.approx(max(on_first, 90 - on_first) * 1e-3)
