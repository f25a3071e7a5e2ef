"""Weights gathered by the stages of a pipeline: by hand. Against real runs: tests/sharding."""

import numpy as np
import pytest
import torch
from torch import nn

from fxpart.capture.training.joint import joint_graph
from fxpart.core.assignment import Assignment
from fxpart.core.topology import DeviceSpec, Link, uniform_topology
from fxpart.schedule import simulate_schedule, stage_costs
from fxpart.schedule.stage_shards import WeightShards
from tests.sketch import problem

WEIGHT_BYTES = 1024


@pytest.mark.parametrize("reshards", [False, True])
def test_two_blocks_on_one_device(reshards: bool) -> None:
    blocks = nn.Sequential(*[nn.Linear(16, 16, bias=False) for _ in range(2)])
    graph = joint_graph(blocks, (torch.zeros(1, 16),))
    spec = DeviceSpec("fast", 10**9, {"float32": 1e15}, 1e15)
    this = problem(graph, uniform_topology((spec,), Link(1.0)))
    placed = Assignment(np.zeros(graph.n_ops, dtype=np.int64), ((0,),))
    # Each collective over two replicas sends half of 1024 bytes: 1 s.
    shards = WeightShards(2, (0, 1), reshards, (Link(512.0),))
    (stage,) = stage_costs(this, placed, shards).stages
    (plain,) = stage_costs(this, placed).stages
    assert stage.shards is not None
    assert stage.weight_bytes == plain.weight_bytes - 2 * WEIGHT_BYTES
    from_shards, _, whole = stage.shards.needs
    assert [needs.gathered_bytes for needs in stage.shards.needs] == [0, 0, 2 * WEIGHT_BYTES]
    # There is no root: if only it is gathered, nothing is.
    assert stage.shards.needs[1] == from_shards
    # While the second weight is copied out of its buffer, that of the first exists too.
    gathered_bytes = (1 if reshards else 2) * WEIGHT_BYTES + 2 * WEIGHT_BYTES
    assert from_shards.forward_peak_bytes == pytest.approx(
        gathered_bytes, abs=plain.forward_peak_bytes
    )
    assert whole.backward_peak_bytes == plain.backward_peak_bytes + 2 * WEIGHT_BYTES
    # Nothing is computed for long, so both gathers are waited for.
    copied_s = from_shards.forward_copy_s
    assert from_shards.forward_wait_s == pytest.approx(2.0 + copied_s, rel=1e-3)
    assert whole.forward_wait_s == whole.backward_wait_s == 0.0
    # Scattered at the end: two weights freed, a buffer and two shards allocated.
    assert stage.shards.reduce_peak_bytes == 4 * WEIGHT_BYTES
    assert stage.shards.gradient_bytes == 2 * WEIGHT_BYTES
    assert stage.reduce_s == pytest.approx(2.0, rel=0.01)
    # Forwards of 1f1b follow backwards, which leave everything gathered.
    result = simulate_schedule("1f1b", stage_costs(this, placed, shards), 3)
    assert result.shards is not None
    gathers = 2 + (2 * 3 if reshards else 0)
    assert result.shards.collectives == gathers + 2
    assert result.shards.collective_bytes == (gathers + 2) * WEIGHT_BYTES
    assert result.shards.exposed_s == pytest.approx(gathers + 2, rel=0.01)
    bare = simulate_schedule("1f1b", stage_costs(this, placed), 3)
    assert result.step_s - bare.step_s >= result.shards.exposed_s


def test_gradients_are_summed_in_another_dtype() -> None:
    blocks = nn.Sequential(*[nn.Linear(16, 16, bias=False) for _ in range(2)]).to(torch.bfloat16)
    graph = joint_graph(blocks, (torch.zeros(1, 16, dtype=torch.bfloat16),))
    spec = DeviceSpec("fast", 10**9, {"float32": 1e15}, 1e15)
    this = problem(graph, uniform_topology((spec,), Link(1.0)))
    placed = Assignment(np.zeros(graph.n_ops, dtype=np.int64), ((0,),))
    links = (Link(512.0),)
    own, cast = (
        stage_costs(this, placed, WeightShards(2, (0, 1), True, links, reduce_dtype=dtype)).stages[
            0
        ]
        for dtype in (None, "float32")
    )
    assert own.shards is not None
    assert cast.shards is not None
    weight = WEIGHT_BYTES // 2
    assert own.gradient_bytes == own.shards.gradient_bytes == 2 * weight
    assert cast.gradient_bytes == cast.shards.gradient_bytes == 4 * weight
    assert [s.size_bytes for s in cast.shards.scatters] == [2 * weight] * 2
    assert [s.size_bytes for s in cast.shards.gathers] == [weight] * 2
    # Two weights and two sums of twice their size; the first weight makes room for a buffer of that
    # size, and is scattered into half a sum and half a weight.
    assert cast.shards.reduce_peak_bytes == (6 - 1 + 2) * weight
    assert own.shards.reduce_peak_bytes == 4 * weight
    whole, cast_whole = own.shards.needs[2], cast.shards.needs[2]
    assert cast_whole.backward_peak_bytes == whole.backward_peak_bytes
    # In the first backward both sums are twice as large, when the last activation is gone.
    grown = cast_whole.first_backward_peak_bytes - whole.first_backward_peak_bytes
    assert grown == pytest.approx(2 * weight, abs=32)
