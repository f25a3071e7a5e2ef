"""Symbolic graphs on disk: reading returns what was written, or nothing."""

from pathlib import Path

import numpy as np
import pytest

from fxpart.capture.cache import read_symbolic, write_symbolic
from fxpart.core.graph import OpGraph
from fxpart.core.symbolic_graph import SymbolicGraph
from fxpart.errors import CacheError
from tests.sketch import Sketch


def _symbolic() -> SymbolicGraph:
    drawn = Sketch()
    value = drawn.input(6)
    result = drawn.op([value], makes=12, uses=[drawn.weight(7)], flops=30, module="head")
    graph = drawn.graph(result)
    tables = {
        "flops": np.array([[0, 10]]),
        "moved_bytes": np.array([[0, 0]]),
        "value_bytes": np.array([[0, 2], [3, 3]]),
        "value_alloc_bytes": np.array([[0, 2], [3, 3]]),
    }
    return SymbolicGraph(
        graph, ("batch",), (3,), np.array([[0], [1]]), tables, np.array([0, -2]), ((1, 9),), (2,)
    )


def test_a_written_graph_is_read_back(tmp_path: Path) -> None:
    symbolic, path = _symbolic(), tmp_path / "deep" / "graph.npz"
    write_symbolic(path, symbolic)
    read = read_symbolic(path)
    assert read is not None
    for field in ("symbols", "captured_at", "ranges", "exact_from"):
        assert getattr(read, field) == getattr(symbolic, field)
    assert np.array_equal(read.exponents, symbolic.exponents)
    assert np.array_equal(read.value_batch_dim, symbolic.value_batch_dim)
    for batch in (1, 9):
        before, after = symbolic.at(batch=batch), read.at(batch=batch)
        for field in OpGraph.__slots__:
            assert np.array_equal(getattr(before, field), getattr(after, field)), field


def test_without_ranges_none_are_read(tmp_path: Path) -> None:
    whole = _symbolic()
    bare = SymbolicGraph(
        whole.graph, ("batch",), (3,), whole.exponents, whole.coefficients, whole.value_batch_dim
    )
    write_symbolic(tmp_path / "graph.npz", bare)
    read = read_symbolic(tmp_path / "graph.npz")
    assert read is not None
    assert (read.ranges, read.exact_from) == ((), ())


def test_missing_and_damaged_files_are_none(tmp_path: Path) -> None:
    path = tmp_path / "graph.npz"
    assert read_symbolic(path) is None
    write_symbolic(path, _symbolic())
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    assert read_symbolic(path) is None
    path.write_bytes(b"not a graph")
    assert read_symbolic(path) is None


def test_numbers_that_contradict_the_graph_are_none(tmp_path: Path) -> None:
    path = tmp_path / "graph.npz"
    write_symbolic(path, _symbolic())
    with np.load(path, allow_pickle=False) as stored:
        arrays = dict(stored)
    np.savez(path, **{**arrays, "exponents": np.array([[0], [2]])})
    assert read_symbolic(path) is None


def test_a_folder_that_cannot_be_created_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CacheError, match="cannot write the captured graph"):
        write_symbolic(tmp_path / "file" / "graph.npz", _symbolic())
