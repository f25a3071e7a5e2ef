"""Tables as printed to a log."""

from typing import TYPE_CHECKING

import pytest

from runner.output.terminal import show

if TYPE_CHECKING:
    from rich.table import Table


def shown(
    table: "Table",
    columns: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> list[str]:
    """Return the lines of a table in a log (no terminal) of that width."""
    monkeypatch.setenv("COLUMNS", str(columns))
    show(table)
    text = capsys.readouterr().out
    lines = [line.rstrip() for line in text.splitlines()]
    assert max(len(line) for line in lines) <= columns
    assert "…" not in text
    assert "\x1b" not in text
    return [line for line in lines if line]
