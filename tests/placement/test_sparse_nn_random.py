"""Tables over devices on random models: views, groups, tied tables, dense work between lookups."""

import itertools
from dataclasses import replace

import numpy as np
import pytest

from fxpart.core.graph import OpGraph
from fxpart.core.topology import Link
from fxpart.cost.evaluate import evaluate
from fxpart.cost.problem import Problem
from fxpart.errors import InfeasibleError, SpecError
from fxpart.placement import make_mode
from fxpart.placement.search.table_packing import packed_by_search, packed_tightly, table_sizes
from fxpart.placement.sparse_nn import embedding_units, looks_up
from tests import independent
from tests.independent_replicas import homes, peak_bytes
from tests.placement.test_sparse_nn import model_of_tables
from tests.sketch import devices, problem, random_graph


def random_model(seed: int, n: int) -> OpGraph:
    """Return a random graph in which some operators with weights are lookups."""
    graph, rng = random_graph(seed, n), np.random.default_rng(seed)
    targets = tuple(
        "aten.embedding.default" if len(graph.uses_of(op)) and rng.random() < 0.5 else "op"
        for op in range(n)
    )
    # Tables are large, also those that dense operators use.
    tables = {int(w) for op in range(n) if looks_up(targets[op]) for w in graph.uses_of(op)}
    sizes = [size * (9 if w in tables else 1) for w, size in enumerate(graph.weight_bytes.tolist())]
    return replace(graph, targets=targets, weight_bytes=np.array(sizes, dtype=np.int64))


def random_sparse_problem(seed: int) -> Problem:
    rng = np.random.default_rng(seed)
    graph = random_model(seed, int(rng.integers(4, 25)))
    whole = independent.peak_bytes(graph, np.zeros(graph.n_ops, dtype=np.int64), 0)
    size = max(1, int(whole * rng.uniform(0.5, 1.0)))
    return problem(graph, devices(*[size] * int(rng.integers(2, 6)), link=Link(4.0, 0.125)))


def test_memory_latency_groups_and_order_on_random_models() -> None:
    spread = views = groups = tied = between = 0
    for seed in range(300):
        this = random_sparse_problem(seed)
        graph = this.graph
        try:
            placed = make_mode("sparse_nn")(this)
        except (InfeasibleError, SpecError):
            continue
        result = evaluate(this, placed, search_bounds=False)
        for device, spec in enumerate(this.topology.devices):
            needed_bytes = peak_bytes(this, placed, device)
            assert result.devices[device].peak_bytes == needed_bytes <= spec.memory_bytes
        assert result.latency_s == pytest.approx(independent.latency_s(this, placed.device_of))
        _check_order(graph, [homes(placed, op) for op in range(graph.n_ops)], placed.partition_of)
        units = [unit.tolist() for unit in embedding_units(graph)]
        at_tables = [op for unit in units for op in unit]
        _check_homes(graph, [homes(placed, op) for op in range(graph.n_ops)], units)
        several = placed.replicas > 1
        spread += several
        views += several and bool((graph.value_base >= 0).any())
        groups += several and not np.array_equal(graph.group, np.arange(graph.n_ops))
        tied += several and any(sum(looks_up(graph.targets[o]) for o in unit) > 1 for unit in units)
        between += several and any(
            min(at_tables) < op < max(at_tables) and op not in at_tables
            for op in range(graph.n_ops)
        )
    assert min(spread, views, groups, tied, between) > 30


def _check_homes(graph: OpGraph, homes_of: list[tuple[int, ...]], units: list[list[int]]) -> None:
    """Check that no group or table is torn, and that dense operators are wherever tables are.

    Every operator is in one partition, since `homes_of` has an entry for each.
    """
    assert all(homes_of[op] == homes_of[int(graph.group[op])] for op in range(graph.n_ops))
    used = sorted({device for at in homes_of for device in at})
    for unit in units:
        assert len({homes_of[op] for op in unit}) == 1
        assert len(homes_of[unit[0]]) == 1
    at_tables = {op for unit in units for op in unit}
    dense = {homes_of[op] for op in range(graph.n_ops) if op not in at_tables}
    assert dense <= {tuple(used)}


def _check_order(graph: OpGraph, homes_of: list[tuple[int, ...]], partition_of: np.ndarray) -> None:
    """Check that partition numbers follow the data, and the graph order on each device."""
    for op in range(graph.n_ops):
        for value in graph.reads_of(op).tolist():
            maker = int(graph.value_producer[value])
            assert maker < 0 or partition_of[maker] <= partition_of[op]
    for index in range(max(map(len, homes_of))):
        where = np.array([at[index % len(at)] for at in homes_of])
        for device in np.unique(where):
            assert (np.diff(partition_of[where == device]) >= 0).all()


def _packings(count: int, most: int) -> list[list[tuple[int, ...]]]:
    """Return all ways to put `count` tables on at most `most` equal devices."""
    packings = set()
    for places in itertools.product(range(most), repeat=count):
        bins = [tuple(t for t in range(count) if places[t] == d) for d in range(most)]
        packings.add(tuple(sorted(tables for tables in bins if tables)))
    return [list(bins) for bins in sorted(packings)]


def _slow_needed(graph: OpGraph, units: list[np.ndarray], tables: tuple[int, ...]) -> int:
    """Return a device's bytes for some tables, with the dense layers or while others run them."""
    lookups = {int(op) for table in tables for op in units[table]}
    at_tables = {int(op) for unit in units for op in unit}
    here = [op in lookups or op not in at_tables for op in range(graph.n_ops)]
    turn = independent.peak_bytes(graph, np.where(here, 0, 1), 0)
    weights = {int(w) for op in range(graph.n_ops) if here[op] for w in graph.uses_of(op)}
    at_rest = np.array([0 if op in lookups else 1 for op in range(graph.n_ops)])
    used = {int(w) for op in lookups for w in graph.uses_of(op)}
    others = independent.peak_bytes(graph, at_rest, 0) + sum(
        int(graph.weight_bytes[w]) for w in weights - used
    )
    return max(turn, others)


def test_only_problems_without_a_packing_are_refused() -> None:
    refused = placed = 0
    for seed in range(250):
        this = random_sparse_problem(seed)
        units = embedding_units(this.graph)
        capacity, count = int(this.topology.memory_bytes[0]), min(this.topology.n_devices, 3)
        if not 2 <= len(units) <= 6:
            continue
        smaller = problem(this.graph, devices(*[capacity] * count))
        sizes = table_sizes(smaller, units)
        needed_bytes = {
            tables: _slow_needed(this.graph, units, tables)
            for size in range(1, len(units) + 1)
            for tables in itertools.combinations(range(len(units)), size)
        }
        for tables, size in needed_bytes.items():
            assert sizes.at_least(tables) <= sizes.needed_bytes(tables) == size
        fits = any(
            all(needed_bytes[tables] <= capacity for tables in bins)
            for bins in _packings(len(units), count)
        )
        each_fits = all(needed_bytes[(table,)] <= capacity for table in range(len(units)))
        try:
            make_mode("sparse_nn")(smaller)
        except InfeasibleError:
            # A table that fits only with another, sharing what both receive, is refused too.
            assert not fits or not each_fits
            refused += 1
        else:
            assert fits
            placed += 1
            order = sorted(range(len(units)), key=lambda t: -needed_bytes[(t,)])
            bins = packed_by_search(sizes, order, capacity, count)
            assert bins is not None
            assert all(needed_bytes[tuple(sorted(tables))] <= capacity for tables in bins)
    assert min(refused, placed) > 15


def test_a_search_packs_what_best_fit_cannot() -> None:
    # Of 8: 4 + 2 + 2 and 3 + 3 + 2 fill two devices; best fit puts 4 and 3 together.
    graph = model_of_tables(40, 30, 30, 20, 20, 20)
    rest = 20 + 2 + 1 + 6 + 1
    this = problem(graph, devices(*[rest + 3 * 3 + 80] * 2))
    sizes = table_sizes(this, embedding_units(graph))
    assert len(packed_tightly(sizes, list(range(6)), rest + 3 * 3 + 80)) == 3
    placed = make_mode("sparse_nn")(this)
    assert [use.weight_bytes for use in evaluate(this, placed).devices] == [100, 100]
