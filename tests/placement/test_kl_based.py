"""Small models on which only one kind of change, worked out by hand, makes `kl_based` faster."""

import itertools

import numpy as np
import pytest

from fxpart.core.graph import IntArray
from fxpart.core.topology import Link
from fxpart.cost.problem import Problem
from fxpart.placement import make_mode
from tests.independent import latency_s, peak_bytes
from tests.sketch import Sketch, devices, problem


def _fits(this: Problem, device_of: IntArray) -> bool:
    return all(
        peak_bytes(this.graph, device_of, device) <= spec.memory_bytes
        for device, spec in enumerate(this.topology.devices)
    )


def _moves(this: Problem, device_of: IntArray) -> list[IntArray]:
    """Return the placements that differ by the move of one operator."""
    placements = []
    for op, device in itertools.product(range(this.graph.n_ops), range(this.topology.n_devices)):
        if device != device_of[op]:
            placements.append(device_of.copy())
            placements[-1][op] = device
    return placements


def _best_s(this: Problem) -> float:
    """Return the minimum latency of all placements that fit."""
    places = itertools.product(range(this.topology.n_devices), repeat=this.graph.n_ops)
    return min(latency_s(this, where) for p in places if _fits(this, where := np.array(p)))


def _crossed_chains() -> Problem:
    """Return a0, b0, a1, b1, where a1 waits for a0 and b1 for b0, on devices that hold two each."""
    sketch = Sketch()
    heads = [sketch.op([], 0, [sketch.weight(10)], 1) for _ in range(2)]
    for head in heads:
        sketch.op([head], 0, [sketch.weight(10)], 1)
    return problem(sketch.graph(), devices(20, 20, link=Link(1.0, 5.0)))


def test_on_full_devices_two_operators_are_swapped() -> None:
    this = _crossed_chains()
    start = make_mode("size_based")(this).device_of
    assert start.tolist() == [0, 0, 1, 1]
    # a0 and b0 end at 1 and 2; the link brings a0 at 6 and b0 at 11; b1 ends at 12.
    assert latency_s(this, start) == 12
    assert not any(_fits(this, moved) for moved in _moves(this, start))
    device_of = make_mode("kl_based")(this).device_of
    # A chain on each device: nothing is sent.
    assert device_of[0] == device_of[2] != device_of[1] == device_of[3]
    assert latency_s(this, device_of) == 2 == _best_s(this)


def _two_blocks() -> Problem:
    """Return a fork, two blocks of three operators and a join.

    Values inside a block take 100 s to move, those that enter and leave it take 1 s.
    """
    sketch = Sketch()
    fork = sketch.op([], 1, flops=1, module="fork")
    ends = []
    for block in ("left", "right"):
        first = sketch.op([fork], 100, flops=2, module=f"{block}.in")
        second = sketch.op([first], 100, flops=2, module=f"{block}.mid")
        ends.append(sketch.op([second], 1, flops=2, module=f"{block}.out"))
    join = sketch.op(ends, 1, flops=1, module="join")
    return problem(sketch.graph(join), devices(10**6, 10**6))


def test_a_tightly_connected_block_moves_as_a_whole() -> None:
    this = _two_blocks()
    start = np.zeros(8, dtype=np.int64)
    assert make_mode("size_based")(this).device_of.tolist() == start.tolist()
    assert latency_s(this, start) == 1 + 6 + 6 + 1
    # One operator elsewhere cuts its block, or makes the fork or the join wait: never faster.
    assert min(latency_s(this, moved) for moved in _moves(this, start)) >= 14
    device_of = make_mode("kl_based")(this).device_of
    assert len({*device_of[1:4]}) == len({*device_of[4:7]}) == 1
    assert device_of[1] != device_of[4]
    # One block and the join elsewhere: the fork's value arrives at 2, the block ends at 8, then 1.
    assert latency_s(this, device_of) == 9 == _best_s(this)


@pytest.mark.parametrize("passes", [1, 8])
def test_operators_move_where_modules_do_not_help(passes: int) -> None:
    sketch = Sketch()
    branches = [sketch.op([], 1, flops=3) for _ in range(2)]
    join = sketch.op(branches, 1, flops=1)
    this = problem(sketch.graph(join), devices(10**6, 10**6))
    device_of = make_mode("kl_based", {"max_passes": passes})(this).device_of
    assert latency_s(this, device_of) == 3 + 1 + 1


def test_equal_branches_are_spread_although_a_single_move_gains_nothing() -> None:
    """Two branches on each device: while any has two, moving one elsewhere lowers no maximum."""
    sketch = Sketch()
    top, ends = sketch.op([], 1, flops=1), []
    for _ in range(8):
        value = top
        for _ in range(3):
            value = sketch.op([value], 1, flops=10)
        ends.append(value)
    near, far = Link(100.0), Link(10.0)
    topology = devices(*[9999] * 16, nodes=[0] * 8 + [1] * 8, link=near, far=far)
    this = problem(sketch.graph(sketch.op(ends, 1, flops=1)), topology)
    # 1, then 30 in parallel, then 1, and one byte to each device and back.
    assert latency_s(this, make_mode("kl_based")(this).device_of) == pytest.approx(32.02)
