"""A graph whose sizes are polynomials: known sizes by hand, and refusals."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxpart.core.graph import MOST_COUNTED, IntArray
from fxpart.core.symbolic_graph import SymbolicGraph, on_graph
from fxpart.errors import SpecError
from tests.sketch import Sketch


def _symbolic() -> SymbolicGraph:
    """One input of 8 b, an operator with a result of 5 b s + 3, and a view of it: at b=2, s=7.
    The first computes 6 b s^2 and moves 2 b; the second nothing.
    """
    drawn = Sketch()
    given_ = drawn.input(16)
    result = drawn.op([given_], makes=5 * 14 + 3, flops=6 * 2 * 49)
    drawn.op([result], makes=5 * 14 + 3, view_of=result)
    graph = replace(drawn.graph(result), moved_bytes=np.array([4, 0]))
    #                        1, b, bs, bs^2
    exponents = np.array([[0, 0], [1, 0], [1, 1], [1, 2]])
    values = [[0, 8, 0, 0], [3, 0, 5, 0], [3, 0, 5, 0]]
    return SymbolicGraph(
        graph=graph,
        symbols=("batch", "seq_len"),
        captured_at=(2, 7),
        exponents=exponents,
        coefficients={
            "flops": np.array([[0, 0, 0, 6], [0, 0, 0, 0]]),
            "moved_bytes": np.array([[0, 2, 0, 0], [0, 0, 0, 0]]),
            "value_bytes": np.array(values),
            "value_alloc_bytes": np.array([*values[:2], [0] * 4]),
        },
        value_batch_dim=np.array([0, 0, 0]),
        ranges=((1, None), (2, 9)),
    )


def test_sizes_follow_the_polynomials() -> None:
    symbolic = _symbolic()
    graph = symbolic.at(batch=3, seq_len=4)
    assert graph.flops.tolist() == [6 * 3 * 16, 0]
    assert graph.moved_bytes.tolist() == [6, 0]
    assert graph.value_bytes.tolist() == [24, 63, 63]
    assert graph.value_alloc_bytes.tolist() == [24, 63, 0]
    assert graph.flops.dtype == np.int64


def test_the_structure_is_shared() -> None:
    symbolic = _symbolic()
    graph = symbolic.at(batch=1, seq_len=2)
    assert graph.names is symbolic.graph.names
    assert graph.reads is symbolic.graph.reads
    assert symbolic.graph.value_bytes.tolist() == [16, 73, 73]


@given(st.integers(1, 10**6), st.integers(2, 9))
def test_every_size_agrees_with_arbitrary_precision_integers(batch: int, seq_len: int) -> None:
    graph = _symbolic().at(batch=batch, seq_len=seq_len)
    assert int(graph.flops[0]) == 6 * batch * seq_len**2
    assert graph.value_bytes.tolist()[1] == 5 * batch * seq_len + 3


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"batch": 1}, "a size of seq_len is missing"),
        ({"batch": 1, "seq_len": 2, "bacth": 3}, "bacth is not symbolic here; nearest: batch"),
        ({"batch": 0, "seq_len": 2}, "batch=0 must be a whole number, 1 or more"),
        ({"batch": True, "seq_len": 2}, "batch=True must be a whole number"),
        ({"batch": 1.5, "seq_len": 2}, "batch=1.5 must be a whole number"),
        ({"batch": 1, "seq_len": 1}, "seq_len=1 is outside what was captured; choose from 2 to 9"),
        ({"batch": 1, "seq_len": 10}, "seq_len=10 is outside"),
    ],
)
def test_invalid_sizes_are_refused(sizes: dict[str, int], message: str) -> None:
    with pytest.raises(SpecError, match=message) as caught:
        _symbolic().at(**sizes)
    assert "\n" not in str(caught.value)


def test_sizes_beyond_64_bits_are_refused_instead_of_wrapped() -> None:
    symbolic = _symbolic()
    largest = MOST_COUNTED // (6 * 81)
    assert int(symbolic.at(batch=largest, seq_len=9).flops[0]) == 6 * 81 * largest
    with pytest.raises(SpecError, match=r"4\.61e\+18 FLOPs, at most 4\.61e\+18 are counted"):
        symbolic.at(batch=largest + 1, seq_len=9)
    for batch in ((2**63 - 1) // (6 * 81) + 1, 2**62, 2**70, 10**400):
        with pytest.raises(SpecError, match="more than an int64 holds"):
            symbolic.at(batch=batch, seq_len=9)


def _wrong_rows(symbolic: SymbolicGraph) -> dict[str, IntArray]:
    return {**symbolic.coefficients, "flops": symbolic.coefficients["flops"][:1]}


def test_inconsistent_parts_are_refused() -> None:
    symbolic = _symbolic()
    flops = symbolic.coefficients["flops"] + 1
    for changes, message in (
        ({"symbols": ("batch", "batch")}, "each once"),
        ({"captured_at": (2,)}, "value of each symbol"),
        ({"exponents": symbolic.exponents[:, :1]}, "one column a symbol"),
        ({"exponents": symbolic.exponents[[0, 1, 2, 2]]}, "each monomial once"),
        ({"ranges": ((1, None),)}, "range of each symbol"),
        ({"exact_from": (1,)}, "range of each symbol"),
        ({"coefficients": {"flops": flops}}, "must be of"),
        ({"coefficients": _wrong_rows(symbolic)}, "have shape"),
        ({"coefficients": {**symbolic.coefficients, "flops": flops}}, "do not give what"),
        ({"value_batch_dim": np.array([0])}, "one number a value"),
    ):
        with pytest.raises(SpecError, match=message):
            replace(symbolic, **changes)


def test_appended_operators_have_constant_sizes() -> None:
    symbolic = _symbolic()
    drawn = Sketch()
    given_ = drawn.input(16)
    result = drawn.op([given_], makes=73, flops=588)
    drawn.op([result], makes=73, view_of=result)
    drawn.op([result], makes=11, flops=13)
    graph = drawn.graph(result)
    graph = replace(
        graph,
        moved_bytes=np.array([4, 0, 17]),
        names=(*symbolic.graph.names, "update"),
        value_names=(*symbolic.graph.value_names, "updated"),
    )
    wide = on_graph(symbolic, graph)
    at = wide.at(batch=3, seq_len=4)
    assert at.flops.tolist() == [288, 0, 13]
    assert at.moved_bytes.tolist() == [6, 0, 17]
    assert at.value_bytes.tolist() == [24, 63, 63, 11]
    assert wide.value_batch_dim.tolist() == [0, 0, 0, -1]


def test_a_constant_monomial_is_added_if_missing() -> None:
    symbolic = _symbolic()
    bare = replace(
        symbolic,
        exponents=symbolic.exponents[1:],
        graph=replace(
            symbolic.graph,
            value_bytes=np.array([16, 70, 70]),
            value_alloc_bytes=np.array([16, 70, 0]),
        ),
        coefficients={name: table[:, 1:] for name, table in symbolic.coefficients.items()},
    )
    assert on_graph(bare, bare.graph).at(batch=1, seq_len=2).value_bytes.tolist() == [8, 10, 10]


def test_another_graph_is_refused() -> None:
    symbolic = _symbolic()
    renamed = replace(symbolic.graph, names=("other", "names"))
    with pytest.raises(SpecError, match="keeps its operators and values"):
        on_graph(symbolic, renamed)
    resized = replace(symbolic.graph, flops=np.array([1, 0]))
    with pytest.raises(SpecError, match="do not give what the captured graph has"):
        on_graph(symbolic, resized)
