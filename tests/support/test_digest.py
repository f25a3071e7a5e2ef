"""Digests of files by content, of large ones by size and time, and of source by its behaviour."""

import os
from hashlib import sha256
from pathlib import Path

import pytest

from fxpart.support.digest import (
    LARGE_BYTES,
    code_digest,
    file_digest,
    file_stamp,
    parsed_source,
    source_digest,
)


def test_a_file_digest_depends_on_the_content(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_text("one")
    assert file_digest(path) == sha256(b"one").hexdigest()
    path.write_text("two")
    assert file_digest(path) == sha256(b"two").hexdigest()
    path.unlink()
    with pytest.raises(FileNotFoundError):
        file_digest(path)


def test_an_edit_of_the_same_size_and_time_is_detected(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_text("one")
    before, stamp = file_digest(path), path.stat().st_mtime_ns
    path.write_text("two")
    os.utime(path, ns=(stamp, stamp))
    assert file_digest(path) != before


def test_a_large_file_is_identified_by_size_and_time(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    with path.open("wb") as file:
        file.truncate(LARGE_BYTES)  # a sparse file: no byte of it is written
    at_first = file_digest(path)
    assert at_first != sha256(bytes(LARGE_BYTES)).hexdigest()
    moved = path.rename(tmp_path / "moved")
    assert file_digest(moved) == at_first
    os.utime(moved, ns=(1, 1))
    assert file_digest(moved) != at_first
    with moved.open("r+b") as file:
        file.truncate(LARGE_BYTES - 1)
    assert file_digest(moved) == sha256(bytes(LARGE_BYTES - 1)).hexdigest()


def test_a_stamp_changes_with_every_write(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_text("one")
    stamp = file_stamp(path)
    assert file_stamp(path) == stamp
    other = tmp_path / "other"
    other.write_text("one")
    other.rename(path)  # as editors save
    assert file_stamp(path) != stamp


CODE = """
from dataclasses import dataclass

@dataclass
class Box:
    width: int = 3

    def area(self, height=None):
        if height is None:
            return None
        return self.width * height + 1.0
"""


def of_source(text: str) -> str:
    return source_digest(text.encode(), parsed_source(text.encode()))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("@dataclass", "# a box\n@dataclass  # with a width"),
        ("from dataclasses", '"""Boxes."""\nfrom dataclasses'),
        ("class Box:", 'class Box:\n    """A box."""\n'),
        ("= 3\n", '= 3\n    """In metres."""\n'),
        ("=None):\n", "=None):\n        'Return the area.'\n"),
        ("self.width * height + 1.0", "(\n            (self.width*height)\n            + 1.0)"),
        ("return None", "return None;"),
        ("import dataclass\n", "import (\n    dataclass,\n)\n"),
    ],
)
def test_comments_docstrings_and_formatting_of_source_are_ignored(old: str, new: str) -> None:
    assert old in CODE
    assert of_source(CODE.replace(old, new)) == of_source(CODE)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("= 3", "= 4"),
        ("= 3", "= '3'"),
        ("= 3", "= 3.0"),
        ("width * height", "height * width"),
        ("return None", "return"),
        ("return None", "pass"),
        ("height is None", "height is not None"),
        ("@dataclass\n", ""),
        ("area", "size"),
        ("=None):", "=True):"),
        ("\n    width: int = 3\n", "\n    width: int = 3\n    name = 'box'\n"),
    ],
)
def test_changes_of_behaviour_in_source_count(old: str, new: str) -> None:
    assert old in CODE
    assert of_source(CODE.replace(old, new)) != of_source(CODE)


@pytest.mark.parametrize("text", ["def f(:", "x = '\0'", "(" * 500 + ")" * 500])
def test_invalid_source_is_identified_by_its_bytes(text: str) -> None:
    assert of_source(text) == sha256(text.encode()).hexdigest()


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package of two modules; the cache of its digest is beside it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    package = tmp_path / "package"
    (package / "modes").mkdir(parents=True)
    (package / "graph.py").write_text("ONE = 1\n")
    (package / "modes" / "single.py").write_text("TWO = 2\n")
    (package / "notes.txt").write_text("no code\n")
    return package


of_folder = code_digest.__wrapped__


def test_code_is_identified_by_its_modules_and_their_names(package: Path) -> None:
    first = of_folder(package)
    (package / "notes.txt").unlink()
    (package / "graph.py").write_text('"""A graph."""\nONE = 1  # and only\n')
    assert of_folder(package) == first
    (package / "modes" / "single.py").write_text("TWO = 3\n")
    edited = of_folder(package)
    (package / "modes" / "single.py").rename(package / "modes" / "double.py")
    renamed = of_folder(package)
    (package / "modes" / "new.py").touch()
    assert len({first, edited, renamed, of_folder(package)}) == 4
    assert of_folder(package / "graph.py") not in (first, edited, renamed)


def test_a_digest_of_code_is_computed_once(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = of_folder(package)
    (cache_file,) = (package.parent / "cache" / "fxpart").iterdir()
    parsed: list[bytes] = []
    monkeypatch.setattr("fxpart.support.digest.parsed_source", parsed.append)
    assert of_folder(package) == first
    assert not parsed
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(package.parent / "cache"))
    cache_file.write_text("")  # as after a power failure
    assert of_folder(package) == first == cache_file.read_text()


def test_the_digest_is_the_same_without_a_cache_folder(
    package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = of_folder(package)
    monkeypatch.setenv("XDG_CACHE_HOME", str(package / "notes.txt"))
    assert of_folder(package) == first
