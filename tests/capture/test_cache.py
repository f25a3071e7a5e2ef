import shutil
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest

from fxpart.capture import cache as graph_cache
from fxpart.capture.cache import (
    cache_key,
    cached_path,
    read_graph,
    refuse_unwritable,
    write_graph,
)
from fxpart.core.graph import OpGraph
from fxpart.errors import CacheError
from fxpart.support.digest import code_digest
from fxpart.support.host import installed_version
from tests.sketch import random_graph


def test_a_written_graph_is_read_back(tmp_path: Path) -> None:
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
def test_a_damaged_entry_counts_as_missing(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "g.npz"
    write_graph(path, random_graph(1, 30))
    whole = path.read_bytes()
    path.write_bytes({"empty": b"", "cut": whole[: len(whole) // 2], "garbage": b"x" * 999}[damage])
    assert read_graph(path) is None
    write_graph(path, random_graph(1, 30))
    assert read_graph(path) is not None


def _rewritten(path: Path, **changes: object) -> None:
    with np.load(path) as stored:
        arrays = dict(stored)
    np.savez(path, **{**arrays, **changes})


def test_an_entry_with_changed_content_counts_as_missing(tmp_path: Path) -> None:
    path = tmp_path / "g.npz"
    graph = random_graph(1, 30)
    deep = np.frombuffer(b"[" * 100_000, dtype=np.uint8)
    wrong: tuple[dict[str, object], ...] = (
        {"text": deep},
        {"reads": graph.reads + 10_000},
        {"reads": graph.reads[:-1]},
        {"uses": graph.uses - 10_000},
        {"flops": graph.flops.astype(np.float64) * np.nan},
        {"weight_bytes": graph.weight_bytes - 2**40},
        {"value_alloc_bytes": np.full_like(graph.value_alloc_bytes, 2**62)},
        {"group": graph.group + 1000},
        {"value_bytes": graph.value_bytes[:3]},
        {"moved_bytes": graph.moved_bytes[:3]},
    )
    for changes in wrong:
        write_graph(path, graph)
        _rewritten(path, **changes)
        assert read_graph(path) is None, list(changes)
    write_graph(path, graph)
    with np.load(path) as stored:
        np.savez_compressed(path, **dict(stored))
    assert read_graph(path) is None


def test_an_entry_marked_as_encrypted_counts_as_missing(tmp_path: Path) -> None:
    path = tmp_path / "g.npz"
    write_graph(path, random_graph(1, 30))
    content = bytearray(path.read_bytes())
    content[content.index(b"PK\x01\x02") + 8] |= 1
    path.write_bytes(content)
    assert read_graph(path) is None


def test_an_unwritable_folder_is_reported_before_a_capture(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CacheError, match="cannot write the captured graph"):
        refuse_unwritable(tmp_path / "file" / "new" / "g.npz")
    refuse_unwritable(tmp_path / "new" / "g.npz")
    assert not (tmp_path / "new").exists()


MODEL = {"name": "gpt2", "batch_size": 1}


def test_the_model_and_the_level_are_in_the_key() -> None:
    key = cache_key(MODEL, "operator")
    assert key == cache_key(dict(reversed(MODEL.items())), "operator")
    for field in MODEL:
        assert key != cache_key(MODEL | {field: "other"}, "operator")
    assert key != cache_key(MODEL | {"seq_len": 8}, "operator")
    assert key != cache_key(MODEL, "module")


@pytest.mark.parametrize("package", ["torch", "fxpart"])
def test_versions_are_in_the_key(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    key = cache_key(MODEL, "operator")
    monkeypatch.setattr(
        graph_cache,
        "installed_version",
        lambda name: "0.0.0" if name == package else installed_version(name),
    )
    assert cache_key(MODEL, "operator") != key


@pytest.fixture
def package_copy(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Path]:
    """A copy of the package's source from which keys are computed."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "digests"))
    for room in ("core", "capture", "sharding"):
        shutil.copytree(graph_cache._FXPART / room, tmp_path / room)
    monkeypatch.setattr(graph_cache, "_FXPART", tmp_path)
    code_digest.cache_clear()
    yield tmp_path
    code_digest.cache_clear()


_ALWAYS = (
    "capture/captured.py",
    "capture/api.py",
    "capture/models/build.py",
    "core/graph.py",
    "core/phases.py",
)
_SYMBOLIC_ALONE = ("core/symbolic_graph.py",)
_NEVER = ("core/partitions.py", "core/topology.py")


@pytest.mark.parametrize("symbolic", [False, True])
@pytest.mark.parametrize("file", [*_ALWAYS, *_SYMBOLIC_ALONE, *_NEVER])
def test_the_source_of_the_capture_is_in_the_key(
    package_copy: Path, file: str, symbolic: bool
) -> None:
    key = cache_key(MODEL, "operator", symbolic=symbolic)
    assert (package_copy / file).is_file()
    for line in ("# changed", "CHANGED = True"):
        with (package_copy / file).open("a") as source:
            source.write(f"{line}\n")
        code_digest.cache_clear()
        if line.startswith("#"):
            assert cache_key(MODEL, "operator", symbolic=symbolic) == key
    matters = file in _ALWAYS or (symbolic and file in _SYMBOLIC_ALONE)
    assert (cache_key(MODEL, "operator", symbolic=symbolic) != key) is matters


def test_a_folder_that_cannot_be_created_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CacheError, match=r"capture\.use_cache=false"):
        write_graph(tmp_path / "file" / "g.npz", random_graph(1, 5))
