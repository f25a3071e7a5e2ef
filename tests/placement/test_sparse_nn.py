"""Tables packed onto devices, dense layers on each: by hand, and on random models."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxpart.core.graph import OpGraph
from fxpart.cost.evaluate import evaluate
from fxpart.cost.problem import Problem
from fxpart.errors import InfeasibleError, SpecError
from fxpart.placement import make_mode
from fxpart.placement.sparse_nn import embedding_units, looks_up
from tests import independent
from tests.sketch import Sketch, devices, problem


def model_of_tables(*tables: int, dense: int = 10, rest: int = 1) -> OpGraph:
    """Return bottom, a lookup of 1 byte in each table, and top, which reads all of them.

    Bottom and top have `dense` bytes of weights and a result of `rest` bytes each.
    """
    sketch = Sketch()
    x, indices = sketch.input(2), [sketch.input(3) for _ in tables]
    bottom = sketch.op([x], rest, [sketch.weight(dense)], 1, module="bottom")
    lookups = [
        sketch.op([index], 1, [sketch.weight(size)], 1, module=f"tables.{i}")
        for i, (index, size) in enumerate(zip(indices, tables, strict=True))
    ]
    top = sketch.op([bottom, *lookups], rest, [sketch.weight(dense)], 1, module="top")
    return _with_lookups(sketch.graph(top))


def _with_lookups(graph: OpGraph) -> OpGraph:
    targets = tuple(
        "aten.embedding_bag.padding_idx" if path.startswith("tables") else "aten.linear.default"
        for path in graph.modules
    )
    return replace(graph, targets=targets)


def _sparse(graph: OpGraph, count: int, size: int) -> Problem:
    return problem(graph, devices(*[size] * count))


def test_tables_are_packed_and_dense_layers_are_on_every_device() -> None:
    # Dense: weights 20, input 2, and at top bottom's byte, four lookups and its own: 28.
    graph = model_of_tables(60, 50, 40, 30)
    this = _sparse(graph, 4, 28 + 3 + 3 + 90)
    placed = make_mode("sparse_nn")(this)
    # Largest first: 60 opens a device, 50 another; 40 goes to the fuller one it fits: 50 + 40;
    # 30 to 60. Bottom is a partition, and so is top, which has to wait for the lookups elsewhere.
    by_operator = [placed.devices_of_partition[p] for p in placed.partition_of]
    assert by_operator == [(0, 1), (0,), (1,), (1,), (0,), (0, 1)]
    result = evaluate(this, placed)
    assert [use.weight_bytes for use in result.devices] == [20 + 90, 20 + 90, 0, 0]
    assert [use.peak_bytes for use in result.devices] == [28 + 6 + 90] * 2 + [0, 0]
    assert (result.rounds, result.replicas) == (2, 2)


def test_one_byte_less_needs_another_device() -> None:
    graph = model_of_tables(60, 50, 40, 30)
    this = _sparse(graph, 4, 28 + 3 + 3 + 90 - 1)
    placed = make_mode("sparse_nn")(this)
    assert placed.replicas == 3


def test_tables_are_spread_by_time_over_the_same_number_of_devices() -> None:
    # With 100 bytes for tables: 90 and 10 would fill one device, 60 and 4 the other. Three lookups
    # of equal time beside one: the smallest tables go where less is computed.
    this = _sparse(model_of_tables(90, 60, 5, 4), 3, 28 + 3 * 3 + 100)
    placed = make_mode("sparse_nn")(this)
    by_operator = [placed.devices_of_partition[p] for p in placed.partition_of]
    assert by_operator[1:5] == [(0,), (1,), (1,), (0,)]


def test_tables_that_only_fit_packed_tightly_are_packed() -> None:
    # Spread, 60 + 30 and 50 + 40 have no space for 20; packed, 60 + 40 and 50 + 30 + 20 are full.
    this = _sparse(model_of_tables(60, 50, 40, 30, 20), 2, 20 + 2 + 7 + 3 * 3 + 100)
    placed = make_mode("sparse_nn")(this)
    assert sorted(use.weight_bytes for use in evaluate(this, placed).devices) == [120, 120]


def test_a_model_that_fits_on_one_device_stays_on_it() -> None:
    placed = make_mode("sparse_nn")(problem(model_of_tables(60, 50), devices(10**6, 50)))
    assert placed.devices_of_partition == ((0,),)


def test_unequal_devices_are_refused() -> None:
    this = problem(model_of_tables(60, 50), devices(100, 100, 99))
    with pytest.raises(
        SpecError, match=r"needs devices of equal memory, but there are 2 x 100 B . 1 x"
    ):
        make_mode("sparse_nn")(this)


def test_equal_devices_of_which_one_has_less_to_spare_are_filled_to_the_least() -> None:
    graph, size = model_of_tables(60, 50, 40, 30), 28 + 3 + 3 + 90
    this = _sparse(graph, 4, size + 10)
    first, *others = this.topology.devices
    less = replace(first, memory_bytes=size, reserved_bytes=10)
    equal = replace(this, topology=replace(this.topology, devices=(less, *others)))
    placed, expected = (
        make_mode("sparse_nn")(equal),
        make_mode("sparse_nn")(_sparse(graph, 4, size)),
    )
    assert placed.partition_of.tolist() == expected.partition_of.tolist()


def test_a_model_without_embeddings_is_refused() -> None:
    graph = replace(model_of_tables(60, 50), targets=("aten.linear.default",) * 4)
    with pytest.raises(SpecError, match="no embedding operators; take mode=size_based"):
        make_mode("sparse_nn")(_sparse(graph, 4, 100))


def test_dense_layers_and_one_table_must_fit_on_a_device() -> None:
    # 20 + 2 of dense, bottom, lookup of table 0, top, the other lookup received; 60 + 3.
    graph, needed_bytes = model_of_tables(60, 50), 20 + 2 + 4 + 60 + 3
    with pytest.raises(InfeasibleError, match=r"tables of tables.0 alone need 89 B .* 88 B") as no:
        make_mode("sparse_nn")(_sparse(graph, 4, needed_bytes - 1))
    assert (no.value.needed_bytes, no.value.available_bytes) == (needed_bytes, needed_bytes - 1)
    assert make_mode("sparse_nn")(_sparse(graph, 4, needed_bytes)).replicas == 2


def test_more_partitions_than_devices_are_refused() -> None:
    graph = model_of_tables(60, 60, 60, 60)
    with pytest.raises(
        InfeasibleError, match=r"make 4 partitions of up to 91 B .* take 4 su"
    ) as no:
        make_mode("sparse_nn")(_sparse(graph, 3, 100))
    assert (no.value.devices_that_fit, no.value.needed_bytes) == (4, 4 * 91)
    assert make_mode("sparse_nn")(_sparse(graph, 4, 100)).replicas == 4


def test_a_model_of_tables_alone_has_no_replicas() -> None:
    sketch = Sketch()
    ends = [sketch.op([], 1, [sketch.weight(60)], module=f"tables.{i}") for i in range(3)]
    graph = _with_lookups(sketch.graph(*ends))
    placed = make_mode("sparse_nn")(_sparse(graph, 3, 70))
    assert sorted(placed.devices_of_partition) == [(0,), (1,), (2,)]


@pytest.mark.parametrize(
    ("target", "is_lookup"),
    [
        ("aten.embedding.default", True),
        ("aten.embedding_bag.padding_idx", True),
        ("aten._embedding_bag_forward_only.default", True),
        ("Embedding", True),
        ("EmbeddingBag", True),
        ("embedding", True),
        ("embedding_bag", True),
        ("aten.embedding_dense_backward.default", False),
        ("aten.linear.default", False),
        ("PatchEmbedding", False),
        ("embedding_layer", False),
    ],
)
def test_lookups_are_recognized(target: str, is_lookup: bool) -> None:
    assert looks_up(target) is is_lookup


def test_indices_are_prepared_on_the_device_that_uses_them() -> None:
    sketch = Sketch()
    indices = sketch.input(4)
    offsets = sketch.op([], 1)
    shaped = sketch.op([indices], 4, view_of=indices)
    row = sketch.op([shaped, offsets], 1, [sketch.weight(60)], module="tables.0")
    shared = sketch.op([], 1)
    other = sketch.op([shared], 1, [sketch.weight(60)], module="tables.1")
    learned = sketch.op([row], 1, [sketch.weight(5)])
    again = sketch.op([learned], 1, [], module="tables.2")
    graph = _with_lookups(sketch.graph(sketch.op([other, shared, again], 1)))
    # `shared` is also read by a dense operator, and `learned` has weights.
    assert [unit.tolist() for unit in embedding_units(graph)] == [[0, 1, 2], [4], [6]]


def test_lookups_in_one_table_and_their_group_are_one_unit() -> None:
    sketch = Sketch()
    tied = sketch.weight(60)
    a = sketch.op([], 1, [tied], module="tables.0")
    b = sketch.op([a], 1, [], group=0)
    c = sketch.op([], 1, [sketch.weight(9)], module="tables.1")
    d = sketch.op([b], 1, [tied], module="tables.2")
    graph = _with_lookups(sketch.graph(sketch.op([c, d], 1)))
    assert [unit.tolist() for unit in embedding_units(graph)] == [[0, 1, 3], [2]]


def _needed_alone(graph: OpGraph, lookups: list[int]) -> int:
    """Return the maximum that a device needs for the dense layers and one lookup."""
    needs = []
    for lookup in lookups:
        side = np.array([int(op in lookups and op != lookup) for op in range(graph.n_ops)])
        needs.append(independent.peak_bytes(graph, side, 0))
    return max(needs)


@given(
    tables=st.lists(st.integers(1, 60), min_size=1, max_size=8),
    count=st.integers(1, 5),
    size=st.integers(20, 150),
    rest=st.integers(0, 5),
)
def test_sparse_nn_keeps_the_contract(tables: list[int], count: int, size: int, rest: int) -> None:
    graph = model_of_tables(*tables, dense=3, rest=rest)
    this = _sparse(graph, count, size)
    n = graph.n_ops
    whole = independent.peak_bytes(graph, np.zeros(n, dtype=np.int64), 0)
    lookups = [op for op in range(n) if looks_up(graph.targets[op])]
    try:
        placed = make_mode("sparse_nn")(this)
    except InfeasibleError:
        # Each table would need a device that holds it and the dense layers.
        assert whole > size
        assert len(tables) > count or _needed_alone(graph, lookups) > size
        return
    result = evaluate(this, placed)
    assert all(use.peak_bytes <= size for use in result.devices)
    homes = [placed.devices_of_partition[p] for p in placed.partition_of]
    if whole <= size:
        assert placed.devices_of_partition == ((0,),)
        return
    used = sorted({homes[op][0] for op in lookups})
    assert used == list(range(len(used)))
    assert all(len(homes[op]) == 1 for op in lookups)
    assert all(homes[op] == tuple(used) for op in range(n) if op not in lookups)
    for op in range(n):
        for value in graph.reads_of(op).tolist():
            maker = int(graph.value_producer[value])
            assert maker < 0 or placed.partition_of[maker] <= placed.partition_of[op]
