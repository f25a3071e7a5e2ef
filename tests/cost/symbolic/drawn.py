"""Symbolic graphs and placements for tests: at random from a seed, or from a few numbers."""

from dataclasses import replace

import numpy as np

from fxpart.core.assignment import Assignment
from fxpart.core.graph import IntArray, OpGraph
from fxpart.core.symbolic_graph import OF_OPERATORS, OF_VALUES, SymbolicGraph
from tests.sketch import random_graph

MONOMIALS: dict[tuple[str, ...], list[tuple[int, ...]]] = {
    ("batch",): [(1,), (0,)],
    ("batch", "seq_len"): [(0, 0), (1, 0), (0, 1), (1, 1), (1, 2)],
}
CAPTURED_AT: dict[tuple[str, ...], tuple[int, ...]] = {
    ("batch",): (3,),
    ("batch", "seq_len"): (3, 5),
}


def with_sizes(
    graph: OpGraph, symbols: tuple[str, ...], tables: dict[str, IntArray]
) -> SymbolicGraph:
    """Return `graph` with these coefficients of `MONOMIALS`; views allocate nothing."""
    exponents = np.array(MONOMIALS[symbols], dtype=np.int64)
    at = CAPTURED_AT[symbols]
    powers = np.prod(np.array(at) ** exponents, axis=1)
    views = graph.value_base >= 0
    tables = {**tables, "value_alloc_bytes": np.where(views[:, None], 0, tables["value_bytes"])}
    sizes = {name: table @ powers for name, table in tables.items()}
    captured = replace(
        graph,
        flops=sizes["flops"],
        moved_bytes=sizes["moved_bytes"],
        value_bytes=sizes["value_bytes"],
        value_alloc_bytes=sizes["value_alloc_bytes"],
    )
    nowhere = np.full(graph.n_values, -1)
    return SymbolicGraph(captured, symbols, at, exponents, tables, nowhere)


def random_symbolic(seed: int, n: int, symbols: tuple[str, ...] = ("batch",)) -> SymbolicGraph:
    """Return a graph whose sizes are random polynomials; a third of the coefficients are zero.
    Operators have work either at every size or at none. Weights have optimizer state.
    """
    rng = np.random.default_rng(seed)
    graph, width = random_graph(seed, n), len(MONOMIALS[symbols])

    def table(rows: int) -> IntArray:
        drawn = rng.integers(0, 50, (rows, width)) * (rng.random((rows, width)) < 0.67)
        return drawn.astype(np.int64)

    tables: dict[str, IntArray] = {name: table(graph.n_ops) for name in OF_OPERATORS}
    tables |= {name: table(graph.n_values) for name in OF_VALUES}
    state = rng.integers(0, 40, len(graph.weight_names))
    return with_sizes(replace(graph, weight_state_bytes=state), symbols, tables)


def random_assignment(seed: int, n: int, devices: int, most_replicas: int = 1) -> Assignment:
    """Return consecutive operators as partitions, each on random devices."""
    rng = np.random.default_rng(seed)
    count = int(rng.integers(1, min(n, 6) + 1))
    cuts = np.sort(rng.choice(np.arange(1, n), size=count - 1, replace=False))
    homes = [
        rng.choice(devices, size=int(rng.integers(1, min(most_replicas, devices) + 1)))
        for _ in range(count)
    ]
    return Assignment(
        np.searchsorted(cuts, np.arange(n), side="right").astype(np.int64),
        tuple(tuple(dict.fromkeys(home.tolist())) for home in homes),
    )
