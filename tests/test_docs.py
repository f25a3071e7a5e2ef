"""The docs list everything that exists."""

import re
from pathlib import Path

import pytest

from fxpart.placement import MODES

ROOT = Path(__file__).resolve().parent.parent
GROUPS = ("mode", "model", "devices", "transfer_rate")


@pytest.mark.parametrize("group", GROUPS)
def test_every_choice_is_listed_in_the_docs(group: str) -> None:
    text = (ROOT / "docs" / "choices.md").read_text(encoding="utf-8")
    files = sorted((ROOT / "conf" / group).glob("*.yaml"))
    assert files
    words = set(re.findall(r"\w+", text))
    unnamed = [path.stem for path in files if path.stem not in words]
    assert not unnamed, f"docs/choices.md does not name conf/{group}: {unnamed}"


def test_every_mode_has_a_file_and_a_row() -> None:
    text = (ROOT / "docs" / "choices.md").read_text(encoding="utf-8")
    assert {path.stem for path in (ROOT / "conf" / "mode").glob("*.yaml")} == {*MODES, "recommend"}
    assert [name for name in (*MODES, "recommend") if f"| `{name}` |" not in text] == []
