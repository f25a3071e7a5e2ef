"""Fast links inside machines and a slow one between two: their effect on plans and costs."""

from itertools import pairwise

import pytest

from fxpart.core.assignment import Assignment
from fxpart.core.data_parallel import split_topology
from fxpart.core.graph import OpGraph
from fxpart.cost.evaluate import evaluate
from fxpart.cost.problem import Problem, make_problem
from fxpart.cost.roofline import LatencyModel
from fxpart.errors import SpecError
from fxpart.placement import make_mode
from runner.experiment.topology import build_topology
from tests.runner.composed import read
from tests.sketch import Sketch

LOOKING_AT_COST = ["cost_aware", "kl_based"]
MB, GB = 10**6, 10**9


def _on_two_machines(graph: OpGraph, *overrides: str, each: int = 8) -> Problem:
    """Return the problem on two DGX H100, with `each` of the eight devices of either."""
    config = read("devices=2x_dgx_h100", *overrides)
    for pool in config.devices.pools:
        pool.count = each
    return make_problem(graph, build_topology(config.devices, config.transfer_rate), LatencyModel())


def _branches(count: int) -> OpGraph:
    """Return a fork of 45 MB to `count` branches of 10 ms on an H100, and their join."""
    sketch = Sketch()
    fork = sketch.op([], 45 * MB, flops=1)
    flops = int(10e-3 * 67e12)
    ends = [sketch.op([fork], 45 * MB, flops=flops, module=f"branch{i}") for i in range(count)]
    return sketch.graph(sketch.op(ends, 1, flops=1))


def _nodes_used(this: Problem, placed: Assignment) -> set[int]:
    return {this.topology.devices[device].node for device in placed.device_of.tolist()}


def test_the_branches_take_the_stated_times() -> None:
    this = _on_two_machines(_branches(2))
    assert this.costs.op_time_s[1, 0] == pytest.approx(10e-3, rel=1e-6)
    # 45 MB take 0.1 ms over NVLink 4 and 0.9 ms between the machines.
    assert 45 * MB * this.costs.s_per_byte[0, 1] == pytest.approx(1e-4)
    assert 45 * MB * this.costs.s_per_byte[0, 8] == pytest.approx(9e-4)


@pytest.mark.parametrize("mode", LOOKING_AT_COST)
def test_a_slow_link_between_machines_keeps_a_model_on_one_of_them(mode: str) -> None:
    graph = _branches(2)
    fast = _on_two_machines(graph, each=1)
    placed = make_mode(mode)(fast)
    # A branch on each machine: one is sent the fork, the other sends its result to the join, both
    # in 0.9 ms; one waits before its 10 ms and the other after. On one machine they take 20 ms.
    assert _nodes_used(fast, placed) == {0, 1}
    assert evaluate(fast, placed).latency_s == pytest.approx(10.9e-3, rel=0.01)
    # 45 MB at 1 GB/s take 45 ms: no computing on the other machine is worth that.
    slow = _on_two_machines(graph, "devices.between_nodes.bytes_per_s=1e9", each=1)
    stays = make_mode(mode)(slow)
    assert len(_nodes_used(slow, stays)) == 1
    assert evaluate(slow, stays).latency_s == pytest.approx(20e-3, rel=0.01)
    # The best plan on the fast link is the best no longer: the link carries one after the other.
    assert evaluate(slow, placed).latency_s == pytest.approx(90e-3, rel=0.01)


@pytest.mark.parametrize("mode", LOOKING_AT_COST)
def test_devices_of_one_machine_are_used_before_those_of_another(mode: str) -> None:
    this = _on_two_machines(_branches(2), each=2)
    placed = make_mode(mode)(this)
    assert len(set(placed.device_of.tolist())) == 2
    assert len(_nodes_used(this, placed)) == 1


@pytest.mark.parametrize("mode", ["size_based", *LOOKING_AT_COST])
def test_a_model_that_needs_both_machines_crosses_once_and_pays_the_rate(mode: str) -> None:
    sketch = Sketch()
    value = sketch.op([], 45 * MB, [sketch.weight(60 * GB)])
    for _ in range(11):
        value = sketch.op([value], 45 * MB, [sketch.weight(60 * GB)])
    graph = sketch.graph(value)
    latency_s = []
    for rate in (50e9, 5e9):
        this = _on_two_machines(graph, f"devices.between_nodes.bytes_per_s={rate}")
        placed = make_mode(mode)(this)
        nodes = [this.topology.devices[device].node for device in placed.device_of.tolist()]
        assert sum(a != b for a, b in pairwise(nodes)) == 1
        latency_s.append(evaluate(this, placed).latency_s)
    # Ten transfers inside machines and one between; the operators compute nothing.
    assert latency_s[0] == pytest.approx(10 * (1e-4 + _near_latency_s()) + 9e-4 + 5e-6)
    assert latency_s[1] - latency_s[0] == pytest.approx(9e-3 - 9e-4)


def _near_latency_s() -> float:
    return float(read("devices=2x_dgx_h100").transfer_rate.latency_s)


@pytest.mark.parametrize("mode", LOOKING_AT_COST)
def test_the_fixed_cost_of_a_link_between_machines_counts_too(mode: str) -> None:
    graph = _branches(2)
    near = _on_two_machines(graph, each=1)
    far = _on_two_machines(graph, "devices.between_nodes.latency_s=0.05", each=1)
    assert _nodes_used(near, make_mode(mode)(near)) == {0, 1}
    assert len(_nodes_used(far, make_mode(mode)(far))) == 1


@pytest.mark.parametrize(("adapters", "rate"), [("null", 400e9), ("8", 400e9), ("1", 50e9)])
def test_replicas_on_two_machines_sum_gradients_over_all_adapters(
    adapters: str, rate: float
) -> None:
    config = read("devices=2x_dgx_h100", f"devices.adapters_per_node={adapters}")
    topology = build_topology(config.devices, config.transfer_rate)
    (link,) = split_topology(topology, 16).links
    assert link.bytes_per_s == pytest.approx(rate)


@pytest.mark.parametrize("adapters", [0, 9])
def test_a_machine_without_adapters_or_with_more_than_devices_is_refused(adapters: int) -> None:
    config = read("devices=2x_dgx_h100", f"devices.adapters_per_node={adapters}")
    with pytest.raises(SpecError, match=rf"from 1 to .* \(8\), got {adapters}"):
        build_topology(config.devices, config.transfer_rate)
