"""The bound for devices with memory for large results but little for weights."""

import numpy as np
import pytest

from fxpart.core.graph import OpGraph
from fxpart.cost.bounds import group_order, lower_bound_s
from fxpart.cost.least_placement import least_placement
from fxpart.cost.memory_bound import memory_bound_s, sections_along
from fxpart.cost.possible_times import needed_bytes
from fxpart.cost.problem import Problem
from fxpart.cost.roomy_bound import roomy_bound_s
from tests.sketch import Sketch, devices, problem


def _layers(*sizes: tuple[int, int, int], inner: int = 20) -> OpGraph:
    """Return layers: an operator with a weight, a large one, and one with a weight.

    `sizes` are bytes of both weights and of what goes from layer to layer.
    """
    sketch = Sketch()
    value = sketch.op([], 1, flops=1)
    for up, down, width in sizes:
        wide = sketch.op([value], inner, [sketch.weight(up)], 1)
        wide = sketch.op([wide], inner, flops=1)
        value = sketch.op([wide], width, [sketch.weight(down)], 1)
    return sketch.graph(value)


def _bounds_s(this: Problem) -> tuple[float, float]:
    """Return the bound from roomy devices, and that of sections."""
    time_s = np.ascontiguousarray(this.costs.op_time_s.min(axis=1))
    apart = ~np.eye(this.topology.n_devices, dtype=np.bool_)
    per_byte_s = this.costs.s_per_byte[apart].min()
    cheapest_s = this.costs.link_latency_s[apart].min() + this.costs.value_bytes * per_byte_s
    before = group_order(this.graph.group).before
    edges, sections = sections_along(this, before, time_s, cheapest_s)
    roomy_s = roomy_bound_s(this, edges, sections, time_s, cheapest_s)
    return roomy_s, memory_bound_s(this, sections, time_s)


def test_weights_pay_where_only_one_device_has_memory() -> None:
    """Two devices of 70 bytes, weights of 4 x 16: beside 40 live bytes one weight has room.

    All weights leave 76 bytes for live tensors, so that one device at most runs both large
    operators. Without any weight there, 4 x 20 bytes are sent at one byte a second. Room for 30
    bytes of weights saves no more of it than 30 / 64 of what all of them would.
    """
    this = problem(_layers((16, 16, 1), (16, 16, 1)), devices(70, 70))
    roomy_s, sections_s = _bounds_s(this)
    assert roomy_s == pytest.approx(7 + 80 * (1 - 30 / 64))
    assert sections_s < roomy_s
    optimum = least_placement(this, "latency")
    assert optimum is not None
    assert optimum.bound_s == 7 + 3 * 20  # the first of them is with the large ones


def test_no_placement_is_below_the_bound() -> None:
    """On layers of random sizes, for which branch and bound proves the optimum."""
    better, proven = 0, 0
    for seed in range(150):
        rng = np.random.default_rng(seed)
        sizes = [tuple(rng.integers(1, 20, 3).tolist()) for _ in range(int(rng.integers(1, 4)))]
        graph = _layers(*sizes, inner=int(rng.integers(5, 30)))
        count = int(rng.integers(2, 5))
        memory_bytes = needed_bytes(problem(graph, devices(1, 1))).max()
        memory_bytes += graph.weight_bytes.sum() * rng.uniform(0.2, 1.0) / count
        speeds = rng.choice([0.5, 1.0, 4.0], size=count).tolist()
        memory = (int(memory_bytes * rng.uniform(0.8, 1.3)) for _ in range(count))
        topology = devices(*memory, speeds=speeds)
        optimum = least_placement(problem(graph, topology), "latency")
        assert optimum is not None
        if optimum.is_proven and not optimum.fits_none:
            proven += 1
            roomy_s, sections_s = _bounds_s(problem(graph, topology))
            better += roomy_s > sections_s
            assert roomy_s <= optimum.bound_s * (1 + 1e-9), seed
            assert lower_bound_s(problem(graph, topology)) >= roomy_s
    assert proven > 100
    assert better > 20
