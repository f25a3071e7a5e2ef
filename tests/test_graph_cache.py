from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest

from fxpart.errors import CacheError
from fxpart.graph import OpGraph
from fxpart.graph_cache import cache_key, cached_path, read_graph, write_graph
from tests.sketch import random_graph


def test_what_is_written_is_read(tmp_path: Path) -> None:
    graph = random_graph(1, 30)
    path = cached_path(tmp_path / "new", cache_key({"name": "x"}, "operator"))
    assert read_graph(path) is None
    write_graph(path, graph)
    again = read_graph(path)
    assert again is not None
    for field in fields(OpGraph):
        assert np.array_equal(getattr(again, field.name), getattr(graph, field.name)), field.name
    assert [p.name for p in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize("damage", ["empty", "cut", "garbage"])
def test_a_damaged_entry_is_as_good_as_none(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "g.npz"
    write_graph(path, random_graph(1, 30))
    whole = path.read_bytes()
    path.write_bytes({"empty": b"", "cut": whole[: len(whole) // 2], "garbage": b"x" * 999}[damage])
    assert read_graph(path) is None
    write_graph(path, random_graph(1, 30))
    assert read_graph(path) is not None


def test_everything_that_decides_the_graph_is_in_the_key() -> None:
    key = cache_key({"name": "gpt2", "batch_size": 1}, "operator")
    assert key == cache_key({"batch_size": 1, "name": "gpt2"}, "operator")
    assert key != cache_key({"name": "gpt2", "batch_size": 2}, "operator")
    assert key != cache_key({"name": "gpt2", "batch_size": 1}, "module")


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CacheError, match=r"capture\.use_cache=false"):
        write_graph(tmp_path / "file" / "g.npz", random_graph(1, 5))
