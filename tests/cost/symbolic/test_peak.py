from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fxpart.core.assignment import Assignment
from fxpart.core.symbolic_graph import SymbolicGraph
from fxpart.cost.evaluate import evaluate
from fxpart.cost.evaluate import peak_bytes as peaks_of
from fxpart.cost.symbolic.peak import peak_formulas
from fxpart.cost.tables import memory_tables
from fxpart.errors import SpecError
from tests.cost.symbolic.drawn import random_assignment, random_symbolic, with_sizes
from tests.sketch import Sketch, devices, problem

GB = 10**9


def _two_in_a_row() -> SymbolicGraph:
    """Return x (2 b) -> a (5 b + 1, weight 100) -> c (3 b, weight 10)."""
    sketch = Sketch()
    x = sketch.input(0)
    a = sketch.op([x], 0, [sketch.weight(100)])
    c = sketch.op([a], 0, [sketch.weight(10)])
    none = np.zeros((2, 2), dtype=np.int64)
    values = np.array([[2, 0], [5, 1], [3, 0]])
    tables = {"flops": none, "moved_bytes": none, "value_bytes": values}
    return with_sizes(sketch.graph(c), ("batch",), tables)


def test_one_device_by_hand() -> None:
    (formula,) = peak_formulas(_two_in_a_row(), Assignment(np.zeros(2, dtype=np.int64), ((0,),)), 1)
    # Weights 110, and at c: x, a and c live.
    assert formula.text() == "111 + 10*batch"
    assert formula.unit == "bytes"


def test_two_devices_by_hand_and_one_unused() -> None:
    formulas = peak_formulas(_two_in_a_row(), Assignment(np.arange(2), ((0,), (2,))), 3)
    assert [f.text() for f in formulas] == ["101 + 7*batch", "0", "11 + 8*batch"]


def test_optimizer_state_is_on_the_device_of_its_weight() -> None:
    symbolic = _two_in_a_row()
    trained = replace(
        symbolic, graph=replace(symbolic.graph, weight_state_bytes=np.array([200, 20]))
    )
    formulas = peak_formulas(trained, Assignment(np.arange(2), ((0,), (1,))), 2)
    assert [f.text() for f in formulas] == ["301 + 7*batch", "31 + 8*batch"]


def test_replicas_need_the_memory_of_the_largest_round() -> None:
    # a on 0 and 1 in turn, c on 0: device 0 has both weights, and either x, a and c, or a and c.
    formulas = peak_formulas(_two_in_a_row(), Assignment(np.arange(2), ((0, 1), (0,))), 2)
    assert [f.text() for f in formulas] == ["111 + 10*batch", "101 + 7*batch"]


def test_the_range_of_the_capture_is_that_of_the_formula() -> None:
    symbolic = replace(_two_in_a_row(), ranges=((2, 64),))
    (formula,) = peak_formulas(symbolic, Assignment(np.zeros(2, dtype=np.int64), ((0,),)), 1)
    assert formula.ranges == ((2, 64),)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    n=st.integers(1, 40),
    count=st.integers(1, 4),
    both=st.booleans(),
)
def test_equal_to_the_peak_of_the_graph_at_every_size(
    seed: int, n: int, count: int, both: bool
) -> None:
    symbolic = random_symbolic(seed, n, ("batch", "seq_len") if both else ("batch",))
    device_of = np.random.default_rng(seed).integers(0, count, n)
    # A partition for each operator: devices may alternate in any order.
    assignment = Assignment(np.arange(n), tuple((int(d),) for d in device_of))
    formulas = peak_formulas(symbolic, assignment, count)
    batch = np.array([1, 2, 3, 4, 7, 8, 16, 35, 64, 70])
    sizes = {"batch": batch, "seq_len": batch[::-1]} if both else {"batch": batch}
    peaks = np.array([formula.at(**sizes) for formula in formulas])
    for column in range(len(batch)):
        graph = symbolic.at(**{name: int(size[column]) for name, size in sizes.items()})
        assert (
            peaks[:, column].tolist() == peaks_of(memory_tables(graph), device_of, count).tolist()
        )


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6), n=st.integers(2, 25), batch=st.integers(1, 70))
def test_the_formula_equals_the_evaluation_with_replicas(seed: int, n: int, batch: int) -> None:
    symbolic = random_symbolic(seed, n)
    assignment = random_assignment(seed, n, 3, most_replicas=3)
    peaks = [int(f.at(batch=batch)) for f in peak_formulas(symbolic, assignment, 3)]
    this = problem(symbolic.at(batch=batch), devices(GB, GB, GB))
    result = evaluate(this, assignment, search_bounds=False)
    assert peaks == [use.peak_bytes for use in result.devices]


def test_a_capture_without_a_constant_keeps_its_weights() -> None:
    symbolic = _two_in_a_row()
    values = symbolic.coefficients["value_bytes"].copy()
    values[1, 1] = 0
    tables = {name: table[:, :1].copy() for name, table in symbolic.coefficients.items()}
    tables |= {"value_bytes": values[:, :1], "value_alloc_bytes": values[:, :1]}
    sizes = values[:, 0] * 3
    graph = replace(symbolic.graph, value_bytes=sizes, value_alloc_bytes=sizes)
    bare = SymbolicGraph(graph, ("batch",), (3,), np.array([[1]]), tables, symbolic.value_batch_dim)
    (formula,) = peak_formulas(bare, Assignment(np.zeros(2, dtype=np.int64), ((0,),)), 1)
    assert formula.text() == "110 + 10*batch"


def test_an_assignment_of_another_model_is_refused() -> None:
    with pytest.raises(SpecError, match="places 3 operators, the model has 2"):
        peak_formulas(_two_in_a_row(), Assignment(np.zeros(3, dtype=np.int64), ((0,),)), 1)


def test_unknown_devices_are_refused() -> None:
    with pytest.raises(SpecError, match="uses device 4, there are 2"):
        peak_formulas(_two_in_a_row(), Assignment(np.zeros(2, dtype=np.int64), ((4,),)), 2)
