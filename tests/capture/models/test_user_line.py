"""Which line of the user's own code an error came through."""

import json
from pathlib import Path

import pytest

from fxpart.capture.models.user_line import own_line


def _failed(text: str, path: Path) -> Exception:
    path.write_text(text)
    names: dict[str, object] = {"json": json}
    try:
        exec(compile(text, str(path), "exec"), names)
    except Exception as error:
        return error
    raise AssertionError("it fails")


def test_the_innermost_line_of_the_users_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "def f():\n    json.loads('[')\n\nf()\n"
    path = tmp_path / "deep" / "mine.py"
    path.parent.mkdir()
    error = _failed(text, path)
    assert own_line(error) == f" ({path}:2)"
    monkeypatch.chdir(tmp_path)
    assert own_line(error) == " (deep/mine.py:2)"


def test_a_cause_counts_before_what_it_caused(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    text = "try:\n    1 / 0\nexcept Exception as error:\n    raise ValueError from error\n"
    assert own_line(_failed(text, path)) == f" ({path}:2)"


def test_without_a_line_of_the_users_nothing_is_said() -> None:
    assert own_line(ValueError("never raised")) == ""
    with pytest.raises(ValueError, match="Expecting") as caught:
        json.loads("[")
    # This test is a file of a user's too; what is below it is Python's.
    assert own_line(caught.value).startswith(" (")
    inside = caught.value.with_traceback(caught.tb.tb_next)
    assert own_line(inside) == ""
