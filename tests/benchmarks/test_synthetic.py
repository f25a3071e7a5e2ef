"""The graphs of the speed benchmarks have their documented structure."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.synthetic import WEIGHT_BYTES, chain_graph, diamonds_graph, synthetic_graph
from fxpart.core.graph import OpGraph
from fxpart.cost.evaluate import peak_bytes
from fxpart.cost.tables import memory_tables
from fxpart.errors import SpecError


def _readers(graph: OpGraph) -> np.ndarray:
    return np.bincount(graph.reads, minlength=graph.n_values)


def _depth(graph: OpGraph) -> int:
    """Return the number of operators on the longest path."""
    depth = np.zeros(graph.n_ops, dtype=np.int64)
    for op in range(graph.n_ops):
        makers = graph.value_producer[graph.reads_of(op)]
        depth[op] = 1 + max((int(depth[maker]) for maker in makers if maker >= 0), default=0)
    return int(depth.max())


@given(n=st.integers(3, 400), seed=st.integers(0, 1000))
@settings(max_examples=40, deadline=None)
def test_the_graph_has_the_given_number_of_operators_all_of_them_read(n: int, seed: int) -> None:
    graph = synthetic_graph(n, seed)
    assert graph.n_ops == n
    assert graph.value_is_output.sum() == 1
    # All but the output have a reader; the mask only if a branch attends.
    computed = graph.value_producer >= 0
    in_vain = computed & (_readers(graph) == 0) & ~graph.value_is_output
    assert set(graph.value_producer[in_vain].tolist()) <= {0}


def test_the_graph_needs_four_devices_of_16_gb() -> None:
    graph = synthetic_graph(2_000)
    everywhere = np.zeros(graph.n_ops, dtype=np.int64)
    needed = int(peak_bytes(memory_tables(graph), everywhere, 1)[0])
    assert 3 * 16e9 < WEIGHT_BYTES - len(graph.weight_bytes) <= graph.total_weight_bytes < needed
    assert needed < 4 * 16e9


def test_the_graph_has_the_features_that_make_placement_hard() -> None:
    graph = synthetic_graph(2_000)
    reader = np.repeat(np.arange(graph.n_ops), np.diff(graph.read_start))
    leap = reader - graph.value_producer[graph.reads]
    kinds = {target.split(".")[1] for target in graph.targets}
    assert {"linear", "view", "split", "getitem", "softmax", "gelu", "add"} <= kinds
    # Branches begin at values with several readers; the mask is read everywhere.
    assert (_readers(graph) > 1).sum() > 100
    assert _readers(graph).max() > 50
    # Long skips span several blocks of the trunk.
    trunk = (leap > 200) & (graph.reads != 1)
    assert 5 < trunk.sum() < 100
    assert (graph.value_base >= 0).sum() > 100
    assert (graph.group < np.arange(graph.n_ops)).sum() > 50
    depths = {path.count(".") + 1 for path in graph.modules}
    assert depths == {1, 2, 3}


def test_views_are_free_and_products_cost_their_weight() -> None:
    graph = synthetic_graph(500)
    for op in range(graph.n_ops):
        values = np.flatnonzero(graph.value_producer == op)
        kind = graph.targets[op].split(".")[1]
        if kind in {"view", "transpose", "split", "getitem"}:
            assert graph.value_alloc_bytes[values].sum() == 0 == graph.moved_bytes[op]
            assert (graph.value_base[values] >= 0).all()
        else:
            weight = int(graph.weight_bytes[graph.uses_of(op)].sum())
            read = int(graph.value_bytes[graph.reads_of(op)].sum())
            written = int(graph.value_bytes[values].sum())
            assert graph.moved_bytes[op] == weight + read + written
            assert graph.flops[op] == 2 * 2048 * (weight // 2)


def test_graphs_depend_only_on_the_seed() -> None:
    first, again, other = synthetic_graph(300, 1), synthetic_graph(300, 1), synthetic_graph(300, 2)
    assert first.names == again.names
    assert first.reads.tolist() == again.reads.tolist()
    assert first.weight_bytes.tolist() == again.weight_bytes.tolist()
    assert first.targets != other.targets


def test_a_chain_is_as_deep_as_it_is_long() -> None:
    graph = chain_graph(50)
    assert graph.n_ops == _depth(graph) == 50
    assert len(set(graph.weight_bytes.tolist())) == 1
    assert WEIGHT_BYTES - 50 <= graph.total_weight_bytes <= WEIGHT_BYTES


def test_a_diamond_is_four_operators_and_two_paths() -> None:
    graph = diamonds_graph(7)
    assert graph.n_ops == 4 * 7
    assert _depth(graph) == 3 * 7
    paths = np.zeros(graph.n_ops, dtype=np.int64)
    for op in range(graph.n_ops):
        makers = [m for m in graph.value_producer[graph.reads_of(op)] if m >= 0]
        paths[op] = sum(paths[m] for m in makers) if makers else 1
    assert paths[-1] == 2**7


def test_too_small_a_graph_is_refused() -> None:
    with pytest.raises(SpecError, match="n=2 is below 3"):
        synthetic_graph(2)
