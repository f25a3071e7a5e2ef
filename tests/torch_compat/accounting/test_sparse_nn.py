"""Embeddings on separate devices, the rest beside them: by hand, and against plain loops."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxpart import InfeasibleError
from fxpart.core.graph import IntArray
from fxpart.torch_compat.accounting.cost import used_bytes
from fxpart.torch_compat.accounting.problem import StaticGraph, StaticPlan
from fxpart.torch_compat.accounting.sparse_nn import combine, sparse_nn
from tests.torch_compat.accounting.small import Row, random_rows, small_graph, small_problem

# Two tables (100 and 80) that read one source, and two operators that read both.
TABLES: list[Row] = [
    (90, 10, [], [0]),
    (70, 10, [], [0]),
    (0, 5, [0, 1], []),
    (0, 5, [2], []),
]
SPARSE = np.array([True, True, False, False])


def _plan(plan: StaticPlan) -> tuple[list[int], tuple[tuple[int, ...], ...]]:
    return plan.partition_of.tolist(), plan.devices_of_partition


def test_tables_get_a_device_each_and_dense_layers_both() -> None:
    # 110 and 90 bytes of tables with their source; 30 of the rest with what it receives.
    plan = sparse_nn(small_problem(TABLES, [10], [140, 140]), SPARSE)
    assert _plan(plan) == ([0, 1, 2, 2], ((0,), (1,), (0, 1)))


def test_tables_that_fit_together_share_a_device() -> None:
    plan = sparse_nn(small_problem(TABLES, [10], [220, 220, 220]), SPARSE)
    assert _plan(plan) == ([0, 0, 1, 1], ((0,), (0,)))


def test_separate_tables_are_combined() -> None:
    # The dense operator in between cuts; the tables, both at the first level, are combined.
    rows: list[Row] = [(90, 10, [], []), (0, 5, [], []), (70, 10, [], []), (0, 5, [0, 1, 2], [])]
    sparse = np.array([True, False, True, False])
    plan = sparse_nn(small_problem(rows, [], [215, 215]), sparse)
    # The dense ones came first, so they are combined and numbered first.
    assert _plan(plan) == ([1, 0, 1, 0], ((0,), (0,)))


def test_partitions_two_levels_apart_are_not_combined() -> None:
    # dense -> table -> dense -> table: tables at levels 1 and 3, dense at 0 and 2.
    rows: list[Row] = [(0, 1, [], []), (5, 1, [0], []), (0, 1, [1], []), (5, 1, [2], [])]
    sparse = np.array([False, True, False, True])
    plan = sparse_nn(small_problem(rows, [], [30, 30]), sparse)
    assert _plan(plan) == ([0, 1, 2, 3], ((0, 1), (0,), (0, 1), (1,)))


REFUSALS: list[tuple[str, list[int], list[bool]]] = [
    ("sparse_nn needs devices with the same memory.* 140 to 141 bytes", [140, 141], [True] * 4),
    ("none of the 4 operators is an embedding", [140, 140], [False] * 4),
    ("operator op0 is too large to fit any device: .* 110 bytes, the largest device has 109",
     [109, 109], [True, True, False, False]),
    ("sparse_nn needs 2 devices of 150 bytes for the embeddings, but only 1 are given",
     [150], [True, True, False, False]),
    ("with partition 0 \\(110 bytes\\) they need 140 bytes, each device has 139",
     [139, 139], [True, True, False, False]),
]  # fmt: skip


@pytest.mark.parametrize(("message", "memory", "sparse"), REFUSALS)
def test_an_infeasible_problem_is_refused(
    message: str, memory: list[int], sparse: list[bool]
) -> None:
    with pytest.raises(InfeasibleError, match=message):
        sparse_nn(small_problem(TABLES, [10], memory), np.array(sparse))


def _levels(graph: StaticGraph, part: list[int], live: list[int]) -> dict[int, int]:
    """Return the longest path to each partition, by iterating to a fixed point."""
    level = dict.fromkeys(live, 0)
    for _ in live:
        for op in range(graph.n_ops):
            for read in graph.reads[graph.read_start[op] : graph.read_start[op + 1]]:
                a, b = part[read], part[op]
                if a != b:
                    level[b] = max(level[b], level[a] + 1)
    return level


def _by_loops(
    graph: StaticGraph, run_of: IntArray, kinds: list[bool], available: int
) -> list[frozenset[int]]:
    """Return the operators of each partition, combined by plain loops as in torch."""

    def used(part: list[int], index: int) -> int:
        inside = np.array([0 if p == index else 1 for p in part])
        return int(used_bytes(graph, inside, 2)[0])

    part = run_of.tolist()
    every = list(range(len(kinds)))
    kind_of = dict(enumerate(kinds))
    for kind in (False, True):
        while True:
            level = _levels(graph, part, every)
            bytes_of = {p: used(part, p) for p in every}
            queue = sorted((p for p in every if kind_of[p] == kind), key=lambda p: bytes_of[p])
            if not queue:
                break
            smallest, *others = queue
            for other in reversed(others):
                joined = [other if p == smallest else p for p in part]
                if abs(level[smallest] - level[other]) <= 1 and used(joined, other) <= available:
                    new = max(kind_of) + 1
                    kind_of[new] = kind
                    part = [new if p in {smallest, other} else p for p in part]
                    every = [p for p in every if p not in {smallest, other}] + [new]
                    break
            else:
                break
    return [frozenset(i for i, p in enumerate(part) if p == index) for index in every]


@given(st.integers(0, 10_000), st.integers(60, 250))
def test_combining_equals_plain_loops(seed: int, available: int) -> None:
    rows, sources = random_rows(seed, 16)
    graph = small_graph(rows, sources)
    rng = np.random.default_rng(seed)
    run_of = np.cumsum(rng.random(16) < 0.6).astype(np.int64)
    run_of -= run_of[0]
    kinds = rng.random(int(run_of[-1]) + 1) < 0.5
    used = used_bytes(graph, run_of, len(kinds))
    number = combine(graph, run_of, kinds, used, available)[run_of]
    combined = [frozenset(np.flatnonzero(number == p).tolist()) for p in range(number.max() + 1)]
    assert combined == _by_loops(graph, run_of, kinds.tolist(), available)
