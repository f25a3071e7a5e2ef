"""Parts of the search: moves, paths, orders, cuts, and merging."""

import itertools
import random

import numpy as np
import pytest

from fxpart.support.random_numbers import chance
from fxpart.torch_compat.accounting.annealing import settle, walk
from fxpart.torch_compat.accounting.contiguous import contiguous, delays, steps_over
from fxpart.torch_compat.accounting.cost import latency_s, path_over_partitions_s, used_bytes
from fxpart.torch_compat.accounting.join import join
from fxpart.torch_compat.accounting.least_latency import depth_first, tidy
from fxpart.torch_compat.accounting.neighbours import (
    keep_if_short,
    nothing_moved,
    paths_of,
    propose,
    transfers,
)
from fxpart.torch_compat.accounting.problem import StaticPlan
from fxpart.torch_compat.accounting.tables import (
    fits,
    heads,
    longest,
    overflow,
    placing_of,
    shift,
    tables_of,
    tails,
)
from tests.torch_compat.accounting.graphs import (
    chain,
    diamonds,
    random_graph,
    random_problem,
    static_graph,
)


@pytest.mark.parametrize("seed", range(10))
def test_moves_update_the_bytes_of_devices(seed: int) -> None:
    rng = random.Random(seed)
    graph = random_graph(rng, 20)
    tables = tables_of(graph, 1.0)
    placing = placing_of(tables, np.zeros(20, dtype=np.int64), 3)
    for _ in range(50):
        shift(tables, placing, rng.randrange(20), rng.randrange(3))
        expected = used_bytes(graph, placing.device, 3)
        assert placing.used.tolist() == expected.tolist()
    memory = expected - np.array([5, 0, -7])
    assert overflow(placing, memory) == 5
    assert not fits(placing, memory)
    assert fits(placing, expected)


@pytest.mark.parametrize("seed", range(10))
def test_a_trial_equals_a_new_evaluation(seed: int) -> None:
    problem = random_problem(seed, most_ops=30)
    tables, memory = tables_of(problem.graph, problem.bytes_per_s), problem.memory_bytes * 9
    n, rng = problem.graph.n_ops, random.Random(seed)
    start = np.array([rng.randrange(len(memory)) for _ in range(n)], dtype=np.int64)
    placing, moved = placing_of(tables, start, len(memory)), nothing_moved(n)
    paths, cuts = paths_of(tables, start), np.empty((n, 2), dtype=np.int64)
    head, tail, state = paths.head, paths.tail, chance(seed)
    assert longest(head) == pytest.approx(float((head + tail).max()), rel=1e-12)
    tails_anew, n_kept, refused = tail.copy(), 0, 0
    for _ in range(60):
        n_cuts = transfers(tables, placing.device, head, cuts)
        assert propose(tables, placing, memory, moved, cuts, n_cuts, state) or moved.many[0] == 0
        if moved.many[0] == 0:
            continue
        exact, before_s = longest(heads(tables, placing.device)), longest(head)
        is_kept, looked_at = keep_if_short(tables, placing, moved, paths, before_s * 1.02)
        assert is_kept == (exact <= before_s * 1.02)
        assert 0 < looked_at <= 2 * n
        n_kept, refused = n_kept + is_kept, refused + (not is_kept)
        # Kept or undone, the tables are those of the current placement.
        assert moved.many[0] == 0
        assert head.tolist() == paths.fresh.tolist() == heads(tables, placing.device).tolist()
        tails(tables, placing.device, tails_anew, n - 1)
        assert tail.tolist() == tails_anew.tolist()
        assert longest(head) == (exact if is_kept else before_s)
    assert n_kept > 0
    assert refused > 0
    assert not moved.marked.any()


def test_a_walk_leaves_a_bad_start() -> None:
    # Odd and even operators are apart: all 29 reads are transfers. One is enough.
    tables, device_of = tables_of(chain(30), 1.0), np.arange(30) % 2
    memory = np.full(2, 3 * int(tables.total.sum()) // 5)
    least_s = float(tables.seconds.sum())
    walked_s, walked = walk(tables, memory, device_of, least_s, 60_000, 0.3, 0)
    assert longest(heads(tables, walked)) == walked_s
    assert fits(placing_of(tables, walked, 2), memory)
    assert np.count_nonzero(np.diff(walked)) <= 2
    assert walked_s < longest(heads(tables, device_of)) / 2


def test_depth_first_order_finishes_a_branch() -> None:
    # 0 splits into the branches 1, 3 and 2, 4, which 5 reads.
    graph = static_graph(
        [[], [0], [0], [1], [2], [3, 4]], total=[1] * 6, output=[1] * 6, seconds=[1.0] * 6
    )
    assert depth_first(tables_of(graph, 1.0)).tolist() == [0, 1, 3, 2, 4, 5]


def test_a_boundary_costs_its_largest_read() -> None:
    graph = static_graph(
        [[], [0], [1], [0, 2]], total=[1] * 4, output=[8, 2, 4, 1], seconds=[1.0] * 4
    )
    tables = tables_of(graph, 1.0)
    assert delays(tables, np.arange(4), tables.read_s).tolist() == [0, 8, 8, 8]
    without_skip = np.where(np.arange(4) == 2, 0.0, tables.read_s)
    assert delays(tables, np.arange(4), without_skip).tolist() == [0, 8, 2, 4]


@pytest.mark.parametrize("memory", [[400, 400, 400], [300, 500, 700], [900, 200]])
@pytest.mark.parametrize("seed", range(5))
def test_a_chain_is_cut_optimally(seed: int, memory: list[int]) -> None:
    graph = chain(9, seed)
    tables, memory_bytes, n = tables_of(graph, 1.0), np.array(memory), 9
    order = np.arange(n, dtype=np.int64)
    boundary = delays(tables, order, tables.read_s)
    devices_of = contiguous(tables, order, boundary, memory_bytes, steps_over(memory_bytes))
    costs = []
    for permutation in itertools.permutations(range(len(memory))):
        for cuts in itertools.combinations_with_replacement(range(n + 1), len(memory) - 1):
            device_of = np.repeat(permutation, np.diff([0, *cuts, n]))
            if (used_bytes(graph, device_of, len(memory)) <= memory_bytes).all():
                costs.append(longest(heads(tables, device_of)))
    if not costs:
        assert (devices_of < 0).any()
    else:
        assert (used_bytes(graph, devices_of, len(memory)) <= memory_bytes).all()
        assert longest(heads(tables, devices_of)) == min(costs)


def test_many_unequal_devices_are_used_largest_first() -> None:
    memory = np.array([10, 30, 20, 50, 40, 60, 70])
    steps = steps_over(memory)
    assert steps.states == 8
    assert steps.device[steps.after == 1].tolist() == [6]
    assert steps_over(np.array([10] * 63)).states == 64


@pytest.mark.parametrize("seed", range(25))
@pytest.mark.parametrize("tries", [0, 300])
def test_merging_lengthens_no_path(seed: int, tries: int) -> None:
    rng, problem = random.Random(seed), random_problem(seed, most_ops=30)
    graph, devices = problem.graph, len(problem.memory_bytes)
    tables = tables_of(graph, problem.bytes_per_s)
    near = sorted if seed % 2 else list
    device_of = np.array(near(rng.randrange(devices) for _ in range(graph.n_ops)))
    bound_s = longest(heads(tables, device_of)) * (1 + 1e-12)
    count, part = join(tables, device_of, devices, bound_s, tries, graph.n_ops)
    homes = np.empty(count, dtype=np.int64)
    homes[part] = device_of
    assert homes[part].tolist() == device_of.tolist()
    assert 0 < path_over_partitions_s(tables, part, count, homes) <= bound_s
    plan = StaticPlan(part, tuple((int(home),) for home in homes))
    assert latency_s(problem, plan) <= bound_s


def test_runs_of_a_chain_become_one_partition_each() -> None:
    tables, device_of = tables_of(chain(12), 1.0), np.repeat([0, 1, 0], 4)
    bound_s = longest(heads(tables, device_of)) * (1 + 1e-12)
    count, part = join(tables, device_of, 2, bound_s, 100, 12)
    assert count == 3
    assert part.tolist() == np.repeat([0, 1, 2], 4).tolist()


def test_partitions_are_few_if_one_per_device_is_too_slow() -> None:
    # The cut passes through a diamond, so one partition on either side would send both halves.
    tables, device_of = tables_of(diamonds(20), 1.0), np.repeat([0, 1], [30, 31])
    bound_s = longest(heads(tables, device_of)) * (1 + 1e-12)
    count, _ = join(tables, device_of, 2, bound_s, 300, 61)
    assert 2 <= count <= 6


def test_so_many_partitions_and_no_more() -> None:
    graph = random_graph(random.Random(2), 200)
    tables, device_of = tables_of(graph, 1e9), np.arange(200) // 50
    bound_s = longest(heads(tables, device_of)) * (1 + 1e-12)
    counts = [join(tables, device_of, 4, bound_s, 300, most)[0] for most in (200, 20)]
    assert counts[0] > 20 >= counts[1]


@pytest.mark.parametrize("seed", range(10))
def test_settling_ends_in_a_placement_that_fits(seed: int) -> None:
    problem = random_problem(seed, most_ops=20)
    tables, n = tables_of(problem.graph, 1.0), problem.graph.n_ops
    rng = random.Random(seed)
    hidden = np.array([rng.randrange(2) for _ in range(n)], dtype=np.int64)
    memory = used_bytes(problem.graph, hidden, 2) + 40
    together = np.zeros(n, dtype=np.int64)
    good, settled = settle(tables, memory, together, 20_000, 30.0, 0)
    assert good == bool((used_bytes(problem.graph, settled, 2) <= memory).all())
    assert good
    good, _ = settle(tables, memory // 9, together, 500, 30.0, 0)
    assert not good


def test_tidying_removes_useless_transfers() -> None:
    # Operator 1 is quick and off the long path; it was left on another device.
    graph = static_graph(
        [[], [0], [0], [1, 2]], total=[10] * 4, output=[10] * 4, seconds=[1.0, 1.0, 90.0, 1.0]
    )
    tables, start = tables_of(graph, 1.0), np.array([0, 1, 0, 0])
    tidied = tidy(tables, np.array([100, 100]), start, longest(heads(tables, start)), 1000)
    assert tidied.tolist() == [0, 0, 0, 0]
    is_kept = tidy(tables, np.array([39, 100]), start, longest(heads(tables, start)), 1000)
    assert is_kept.tolist() == [0, 1, 0, 0]
    assert tidy(tables, np.array([100, 100]), start, 200.0, 0).tolist() == start.tolist()


def test_a_read_costs_its_bytes_and_common_sources_over_the_rate() -> None:
    graph = static_graph(
        [[], [0], [0, 1]],
        total=[6, 8, 1],
        output=[6, 8, 1],
        seconds=[1.0] * 3,
        sources=[[0, 1], [1], [0]],
        source_bytes=[10, 100],
    )
    tables = tables_of(graph, 2.0)
    assert tables.read_s.tolist() == [106 / 2, 16 / 2, 8 / 2]
    assert tables.readers.tolist() == [1, 2, 2]
    assert tables.reader_s.tolist() == [106 / 2, 16 / 2, 8 / 2]
    assert tables.users.tolist() == [0, 2, 0, 1]
