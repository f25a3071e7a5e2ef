"""FLOPs and bytes as formulas."""

import numpy as np
import pytest
import sympy
from hypothesis import given, settings
from hypothesis import strategies as st

from fxpart.core.symbolic_graph import OF_OPERATORS, OF_VALUES
from fxpart.cost.symbolic.peak import cost_formula
from fxpart.errors import SpecError
from tests.cost.symbolic.drawn import random_symbolic, with_sizes
from tests.sketch import Sketch

FIELDS = (*OF_OPERATORS, *OF_VALUES)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from(FIELDS), st.integers(1, 70), st.integers(1, 70))
def test_formulas_equal_the_graph_at_any_size(seed: int, field: str, batch: int, seq: int) -> None:
    symbolic = random_symbolic(seed, 12, ("batch", "seq_len"))
    column = getattr(symbolic.at(batch=batch, seq_len=seq), field)
    assert cost_formula(symbolic, field).at(batch=batch, seq_len=seq) == column.sum()
    names = symbolic.graph.names if field in OF_OPERATORS else symbolic.graph.value_names
    index = seed % len(names)
    formula = cost_formula(symbolic, field, names[index])
    assert formula.at(batch=batch, seq_len=seq) == column[index]


def test_a_cost_is_a_sympy_expression() -> None:
    sketch = Sketch()
    graph = sketch.graph(sketch.op([sketch.input(0)], 1))
    tables = {
        "flops": np.array([[6, 4]], dtype=np.int64),
        "moved_bytes": np.array([[2, 0]], dtype=np.int64),
        "value_bytes": np.array([[8, 0], [4, 1]], dtype=np.int64),
    }
    symbolic = with_sizes(graph, ("batch",), tables)
    batch = sympy.Symbol("batch", integer=True, positive=True)
    assert cost_formula(symbolic, "flops").sympy() == 6 * batch + 4
    assert cost_formula(symbolic, "value_bytes").sympy() == 12 * batch + 1
    assert cost_formula(symbolic, "value_bytes", "v0").sympy() == 8 * batch
    assert "FLOPs" in cost_formula(symbolic, "flops").latex()


def test_names_that_do_not_exist_are_refused() -> None:
    symbolic = random_symbolic(0, 4)
    with pytest.raises(SpecError, match="nearest: flops"):
        cost_formula(symbolic, "flop")
    with pytest.raises(SpecError, match="op9 is not a name of flops; nearest: op"):
        cost_formula(symbolic, "flops", "op9")
