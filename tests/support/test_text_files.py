import json
from pathlib import Path
from types import MappingProxyType

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxpart.errors import CacheError
from fxpart.support.text_files import json_text, write_json, write_text

ITEMS = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.text(max_size=5)
    # Where json.dumps would write words that JSON does not have, null is written.
    | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text(max_size=3), inner, max_size=4)
    ),
)
DOCUMENTS = st.dictionaries(st.text(max_size=3), ITEMS, max_size=4)


def test_text_replaces_the_old_file_and_leaves_no_other(tmp_path: Path) -> None:
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


@given(DOCUMENTS)
def test_json_is_the_output_of_python_with_an_indent(document: dict[str, object]) -> None:
    assert json_text(document) == json.dumps(document, indent=1, sort_keys=True) + "\n"


def test_other_sequences_and_mappings_are_written_as_list_and_dictionary() -> None:
    document = {"r": range(2), "m": MappingProxyType({"b": 1, "a": ()}), "e": MappingProxyType({})}
    assert json.loads(json_text(document)) == {"r": [0, 1], "m": {"b": 1, "a": []}, "e": {}}


def test_json_refuses_other_values() -> None:
    with pytest.raises(TypeError, match="object has no place"):
        json_text({"a": object()})
