import ast
from typing import Any

import numpy as np
import pytest
import sympy
from hypothesis import given
from hypothesis import strategies as st

from fxpart.core.graph import IntArray
from fxpart.cost.symbolic.dominance import from_one, undominated
from fxpart.cost.symbolic.formula import MaxFormula, max_formula
from fxpart.errors import SpecError

BATCH = np.array([[0], [1]])
BOTH = np.array([[0, 0], [1, 0], [0, 1], [1, 1], [1, 2]])


def _batch(*rows: tuple[int, int]) -> MaxFormula:
    return max_formula(("batch",), BATCH, np.array(rows), "bytes")


def _both(rows: list[list[int]]) -> MaxFormula:
    return max_formula(("batch", "seq_len"), BOTH, np.array(rows), "bytes")


def _largest_by_hand(rows: list[list[int]], exponents: IntArray, sizes: dict[str, int]) -> int:
    values = list(sizes.values())
    return max(
        sum(
            int(c) * int(np.prod([v ** int(e) for v, e in zip(values, powers, strict=True)]))
            for c, powers in zip(row, exponents, strict=True)
        )
        for row in rows
    )


def test_a_formula_is_the_largest_row_at_each_size() -> None:
    formula = _batch((100, 1), (10, 30))
    # 100 + b is larger up to b = 3, where 103 > 100; from 4 on 130 > 104.
    assert formula.at(batch=[1, 2, 3, 4]).tolist() == [101, 102, 103, 130]
    assert formula.at(batch=3).dtype == np.int64
    assert formula.at(batch=3).shape == ()


def test_sizes_are_broadcast() -> None:
    formula = _both([[0, 0, 0, 0, 1], [100, 0, 0, 0, 0]])
    values = formula.at(seq_len=np.array([[1], [10]]), batch=np.array([1, 2, 3]))
    assert values.tolist() == [[100, 100, 100], [100, 200, 300]]


def test_a_row_exceeded_everywhere_is_dropped() -> None:
    # 1 + b is at most 2 b for b of at least 1, though not below 1.
    assert _batch((1, 1), (0, 2)).rows.tolist() == [[2]]
    assert _batch((5, 2), (5, 2), (5, 1)).rows.tolist() == [[5, 2]]


def test_with_one_symbol_a_row_exceeded_by_two_others_is_dropped() -> None:
    # At b = 4 the first two are 14 and 15, the third 10; it is never the largest.
    assert sorted(_batch((10, 1), (3, 3), (2, 2)).rows.tolist()) == [[3, 3], [10, 1]]
    # 7 + 2 b lies between the lines 10 + b and 1 + 4 b, below both at their crossing (b = 3).
    assert sorted(_batch((10, 1), (1, 4), (6, 2)).rows.tolist()) == [[1, 4], [10, 1]]
    # 8 + 2 b does not.
    assert len(_batch((10, 1), (1, 4), (8, 2)).rows) == 3


def test_rows_are_ordered_by_their_values_at_large_sizes() -> None:
    assert _batch((100, 1), (10, 30), (60, 20)).rows.tolist() == [[10, 30], [60, 20], [100, 1]]


def test_the_change_of_variable_by_hand() -> None:
    # x = 1 + y; x^2 = 1 + 2 y + y^2; columns are 1, y, y^2.
    assert from_one(np.array([[0], [1], [2]])).tolist() == [[1, 0, 0], [1, 1, 0], [1, 2, 1]]


_ROWS = st.lists(st.lists(st.integers(-20, 40), min_size=5, max_size=5), min_size=1, max_size=12)


@given(rows=_ROWS, batch=st.integers(1, 70), seq_len=st.integers(1, 70))
def test_dropping_rows_changes_no_value(rows: list[list[int]], batch: int, seq_len: int) -> None:
    formula = _both(rows)
    sizes = {"batch": batch, "seq_len": seq_len}
    assert int(formula.at(**sizes)) == _largest_by_hand(rows, BOTH, sizes)


@given(rows=st.lists(st.tuples(st.integers(-50, 50), st.integers(-9, 9)), min_size=1, max_size=12))
def test_with_one_symbol_every_remaining_row_is_needed(rows: list[tuple[int, int]]) -> None:
    formula = _batch(*rows)
    sizes = np.arange(1, 120)
    whole = np.max([c + b * sizes for c, b in rows], axis=0)
    assert formula.at(batch=sizes).tolist() == whole.tolist()
    remaining = max_formula(("batch",), BATCH, np.array(rows), "bytes")
    if len(remaining.rows) > 1:
        full = np.zeros((len(remaining.rows), 2))
        full[:, remaining.exponents[:, 0]] = remaining.rows
        # Also between integers, where two lines may cross.
        fine = np.arange(1, 120, 1 / 64)
        for left_out in range(len(full)):
            rest = np.delete(full, left_out, axis=0)
            best = np.max(rest @ [np.ones_like(fine), fine], axis=0)
            left_out_values = full[left_out] @ [np.ones_like(fine), fine]
            assert (left_out_values > best).any()


def test_coefficients_too_large_to_shift_are_compared_unshifted() -> None:
    # 2^62 + 2^62 exceeds int64.
    assert undominated(BATCH, np.array([[2**62, 2**62], [1, 0]])).tolist() == [[2**62, 2**62]]


def test_bytes_are_compared_exactly() -> None:
    formula = _batch((10**13 + 20, 1), (10**13, 19))
    assert formula.at(batch=[1, 2]).tolist() == [10**13 + 21, 10**13 + 38]


def test_float_rows_that_differ_by_rounding_are_merged() -> None:
    rows = np.array([[0.1 + 0.2, 1.0], [0.3, 1.0], [2.0, 0.1]])
    assert len(max_formula(("batch",), BATCH, rows, "s").rows) == 2


def test_seconds_are_floats() -> None:
    formula = max_formula(("batch",), BATCH, np.array([[0.5, 0.25]]), "s")
    assert formula.at(batch=[1, 2]).tolist() == [0.75, 1.0]


def test_text_reads_like_a_hand_written_formula() -> None:
    assert _batch((5, 1)).text() == "5 + batch"
    assert _batch((100, 1), (-10, 30)).text() == "max(\n  -10 + 30*batch,\n  100 + batch,\n)"
    assert _both([[0, 0, 0, 2, 7]]).text() == "2*batch*seq_len + 7*batch*seq_len**2"
    assert _both([[0, 0, 0, 0, 0]]).text() == "0"
    seconds = max_formula(("batch",), BATCH, np.array([[0.5, 1.23456789e-7]]), "s")
    assert seconds.text() == "0.5 + 1.23457e-07*batch"


@given(rows=_ROWS, batch=st.integers(1, 9), seq_len=st.integers(1, 9))
def test_text_evaluates_to_the_formula(rows: list[list[int]], batch: int, seq_len: int) -> None:
    formula = _both(rows)
    text = formula.text()
    assert len(text.splitlines()) == (1 if len(formula.rows) == 1 else len(formula.rows) + 2)
    code = compile(ast.parse(text, mode="eval"), "formula", "eval")
    value = eval(code, {"max": max, "batch": batch, "seq_len": seq_len})
    assert value == int(formula.at(batch=batch, seq_len=seq_len))


def test_latex_has_a_line_for_each_row() -> None:
    assert _batch((5, 2)).latex() == (
        "\\begin{align*}\n"
        "\\mathrm{bytes}(\\mathrm{batch}) &= 5 + 2\\,\\mathrm{batch}\n\\end{align*}"
    )
    assert _both([[0, 0, 0, 0, 3], [1000, 0, 0, 0, 0]]).latex() == (
        "\\begin{align*}\n"
        "\\mathrm{bytes}(\\mathrm{batch}, \\mathrm{seq\\_len}) = \\max\\{\\;& "
        "3\\,\\mathrm{batch}\\,\\mathrm{seq\\_len}^{2}, \\\\\n"
        "& 1000 \\;\\}\n"
        "\\end{align*}"
    )
    # After three terms there is no space left.
    assert _both([[1, 2, 3, 4, 5]]).latex().splitlines()[1:3] == [
        "\\mathrm{bytes}(\\mathrm{batch}, \\mathrm{seq\\_len}) &= "
        "1 + 2\\,\\mathrm{batch} + 3\\,\\mathrm{seq\\_len}\\\\",
        "&\\quad + 4\\,\\mathrm{batch}\\,\\mathrm{seq\\_len}"
        " + 5\\,\\mathrm{batch}\\,\\mathrm{seq\\_len}^{2}",
    ]
    seconds = max_formula(("batch",), BATCH, np.array([[0.0, 1.5e-7]]), "s")
    assert "= 1.5 \\cdot 10^{-7}\\,\\mathrm{batch}" in seconds.latex()


@given(rows=_ROWS, batch=st.integers(1, 9), seq_len=st.integers(1, 9))
def test_sympy_evaluates_to_the_formula(rows: list[list[int]], batch: int, seq_len: int) -> None:
    formula = _both(rows)
    expression = formula.sympy()
    arguments = expression.args if isinstance(expression, sympy.Max) else (expression,)
    assert len(arguments) == len(formula.rows)
    sizes = {"batch": batch, "seq_len": seq_len}
    values = [
        int(
            argument.subs(
                {sympy.Symbol(k, integer=True, positive=True): v for k, v in sizes.items()}
            )
        )
        for argument in arguments
    ]
    assert max(values) == int(formula.at(**sizes))


def test_a_maximum_of_many_rows_is_not_evaluated() -> None:
    # Sixty parabolas, none of which dominates another: sympy would compare every pair.
    rows = [[(60 - i) ** 2 * 100, 0, 0, i, i * i] for i in range(60)]
    formula = _both(rows)
    assert len(formula.rows) == 60
    assert len(formula.sympy().args) == 60


@pytest.mark.parametrize(
    ("sizes", "says"),
    [
        ({}, "a size of batch is missing"),
        ({"bach": 3}, "bach is not symbolic here; nearest: batch"),
        ({"batch": 0}, "batch=0 must be a whole number"),
        ({"batch": [4, -1]}, "batch=-1 must be a whole number"),
        ({"batch": 1.5}, "batch must be a whole number, 1 or more, got float64"),
        ({"batch": 2**62}, "more than an int64 holds"),
    ],
)
def test_wrong_sizes_are_refused(sizes: dict[str, Any], says: str) -> None:
    with pytest.raises(SpecError, match=says) as caught:
        _batch((3, 4)).at(**sizes)
    assert "\n" not in str(caught.value)


def test_sizes_outside_the_captured_range_are_refused() -> None:
    formula = max_formula(("batch",), BATCH, np.array([[1, 2]]), "bytes", ((2, 8),))
    assert formula.at(batch=[2, 8]).tolist() == [5, 17]
    with pytest.raises(SpecError, match="batch=1 is outside what was captured; choose 2 or more"):
        formula.at(batch=1)
    with pytest.raises(SpecError, match="batch=9 is outside what was captured; choose 8 or less"):
        formula.at(batch=[3, 9])


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"unit": "byte"}, "unit=byte of a formula; nearest: bytes"),
        ({"symbols": ("batch", "seq_len")}, "needs as many exponents"),
        ({"rows": np.array([[1, 2, 3]])}, "one row or more of as many coefficients"),
        ({"rows": np.empty((0, 2), dtype=np.int64)}, "one row or more"),
        ({"ranges": ((1, None), (1, None))}, "the range of each symbol, or of none"),
    ],
)
def test_inconsistent_parts_are_refused(change: dict[str, Any], says: str) -> None:
    parts: dict[str, Any] = {
        "symbols": ("batch",),
        "exponents": BATCH,
        "rows": np.array([[1, 2]]),
        "unit": "bytes",
        **change,
    }
    with pytest.raises(SpecError, match=says):
        MaxFormula(**parts)
