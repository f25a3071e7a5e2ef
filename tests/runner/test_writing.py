import json
from pathlib import Path

import numpy as np
import pytest

from fxpart.errors import CacheError
from runner.writing import json_text, write_json, write_text


def test_text_replaces_the_old_file_and_leaves_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "made" / "a.txt"
    write_text(path, "old")
    write_text(path, "new ü\n")
    assert path.read_bytes() == "new ü\n".encode()
    assert [p.name for p in path.parent.iterdir()] == ["a.txt"]


def test_a_write_that_fails_keeps_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    write_text(path, "old")
    with pytest.raises(UnicodeEncodeError):
        write_text(path, "half\ud800")
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["a.txt"]


def test_a_place_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(CacheError, match=r"cannot write .*file/a.json: .*; choose") as caught:
        write_json(tmp_path / "file" / "a.json", {})
    assert "\n" not in str(caught.value)


def test_json_is_sorted_and_plain() -> None:
    document = {"b": np.int64(1), "a": np.array([0.5, np.inf]), "p": Path("x"), "t": (True, None)}
    text = json_text(document)
    assert json.loads(text) == {"a": [0.5, None], "b": 1, "p": "x", "t": [True, None]}
    assert text.index('"a"') < text.index('"b"')
    assert text == json_text(dict(reversed(document.items())))


def test_json_refuses_what_it_cannot_say() -> None:
    with pytest.raises(TypeError, match="object has no place"):
        json_text({"a": object()})
