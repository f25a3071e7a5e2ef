"""Contracted operators: cycles are closed, sizes are never too small, plans can be expanded."""

import random

import numpy as np
import pytest

from fxpart.core.graph import csr
from fxpart.torch_compat.accounting.contraction import contract
from fxpart.torch_compat.accounting.cost import used_bytes
from fxpart.torch_compat.accounting.problem import StaticGraph


def _graph(before: list[list[int]], sources: list[list[int]] | None = None) -> StaticGraph:
    """Return operators of 10 + 3^i bytes that return 3^i bytes and take i + 1 seconds."""
    n = len(before)
    read_start, reads = csr(before)
    source_start, used = csr(sources or [[0]] * n)
    output = np.array([3**op for op in range(n)], dtype=np.int64)
    return StaticGraph(
        names=tuple(f"op{op}" for op in range(n)),
        total_bytes=output + 10,
        output_bytes=output,
        latency_s=np.arange(1.0, n + 1.0),
        read_start=read_start,
        reads=reads,
        source_bytes=np.array([1000], dtype=np.int64),
        source_start=source_start,
        sources=used,
    )


def _reads(graph: StaticGraph) -> list[list[int]]:
    return [
        sorted(graph.reads[graph.read_start[op] : graph.read_start[op + 1]].tolist())
        for op in range(graph.n_ops)
    ]


def test_without_ties_the_graph_is_unchanged() -> None:
    graph = _graph([[], [0]])
    contraction = contract(graph, [])
    assert contraction.graph is graph
    assert contraction.whole_of.tolist() == [0, 1]


def test_two_operators_of_a_fork_are_contracted() -> None:
    # 0 -> 1, 0 -> 2, (1, 2) -> 3; 1 and 2 stay together.
    contraction = contract(_graph([[], [0], [0], [1, 2]]), [(1, 2)])
    assert contraction.whole_of.tolist() == [0, 1, 1, 2]
    assert _reads(contraction.graph) == [[], [0], [1]]
    assert contraction.graph.names == ("op0", "op1 (together with op2)", "op3")
    # Both read the 1 byte of operator 0: that of the second reader is added.
    assert contraction.graph.total_bytes.tolist() == [11, 10 + 3 + 10 + 9 + 1, 10 + 27]
    assert contraction.graph.output_bytes.tolist() == [1, 3 + 9, 27]
    assert contraction.graph.latency_s.tolist() == [1.0, 3.0, 4.0]


def test_operators_in_between_are_contracted_too() -> None:
    contraction = contract(_graph([[], [0], [1], [2]]), [(0, 2)])
    assert contraction.whole_of.tolist() == [0, 0, 0, 1]
    assert contraction.graph.latency_s.tolist() == [1.0 + 2.0 + 3.0, 4.0]


def test_two_ties_that_wait_for_each_other_are_contracted() -> None:
    # 0 -> 1 and 2 -> 3; the ties (0, 3) and (1, 2) wait for each other.
    contraction = contract(_graph([[], [0], [], [2]]), [(0, 3), (1, 2)])
    assert contraction.whole_of.tolist() == [0, 0, 0, 0]


def test_a_tie_follows_all_operators_that_it_reads() -> None:
    # 0 stays with 3, which reads 2, which reads 1.
    contraction = contract(_graph([[], [], [1], [2]]), [(0, 3)])
    assert contraction.whole_of.tolist() == [2, 0, 1, 2]
    assert _reads(contraction.graph) == [[], [0], [1]]


def test_a_long_chain_needs_no_recursion() -> None:
    n = 3000
    graph = _graph([[]] + [[0]] * 5)
    read_start, reads = csr([[op - 1] if op else [] for op in range(n)])
    source_start, used = csr([[] for _ in range(n)])
    ones = np.ones(n, dtype=np.int64)
    chain = StaticGraph(
        tuple(map(str, range(n))),
        ones,
        ones,
        ones.astype(np.float64),
        read_start,
        reads,
        graph.source_bytes,
        source_start,
        used,
    )
    assert contract(chain, [(0, n - 1)]).graph.n_ops == 1


@pytest.mark.parametrize("seed", range(40))
def test_invariants_of_random_graphs(seed: int) -> None:
    rng = random.Random(seed)
    n = rng.randint(3, 14)
    before = [sorted(rng.sample(range(op), min(op, rng.randint(0, 3)))) for op in range(n)]
    graph = _graph(before)
    ties = [rng.sample(range(n), 2) for _ in range(rng.randint(1, 3))]
    contraction = contract(graph, ties)
    whole_of = contraction.whole_of.tolist()
    assert all(whole_of[a] == whole_of[b] for a, b in ties)
    # In order, and so without a cycle.
    for op, row in enumerate(before):
        for read in row:
            assert whole_of[read] <= whole_of[op]
    assert all(read < op for op, row in enumerate(_reads(contraction.graph)) for read in row)
    assert whole_of == _by_reachability(before, ties, whole_of)
    # Partitions of the wholes never need more than was counted.
    for _ in range(5):
        placed = np.array(
            [rng.randrange(3) for _ in range(contraction.graph.n_ops)], dtype=np.int64
        )
        reckoned = used_bytes(contraction.graph, placed, 3)
        assert (used_bytes(graph, placed[contraction.whole_of], 3) <= reckoned).all()


def _by_reachability(before: list[list[int]], ties: list[list[int]], order: list[int]) -> list[int]:
    """Return the wholes by definition: operators that reach each other, with ties both ways."""
    n = len(before)
    reach = np.eye(n, dtype=bool)
    for op, row in enumerate(before):
        reach[row, op] = True
    for a, b in ties:
        reach[a, b] = reach[b, a] = True
    for middle in range(n):
        reach |= np.outer(reach[:, middle], reach[middle])
    return [order[int(np.flatnonzero(reach[op] & reach[:, op])[0])] for op in range(n)]
