"""The Python in the README and in the docs runs as it stands."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = (
    ROOT / "README.md",
    *(ROOT / "docs" / f"{name}.md" for name in ("differences", "execution")),
)
BLOCKS = [
    block
    for page in PAGES
    for block in re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    # One with a name needs files beside it, and has a test of its own.
    if not block.startswith("# ")
]


def test_there_is_python_to_run() -> None:
    assert len(BLOCKS) == 3


@pytest.mark.parametrize("block", BLOCKS)
def test_the_python_runs(block: str, capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(block, "a page", "exec"), {"__name__": "__main__"})
    # What says nothing has asserted something.
    assert capsys.readouterr().out.strip() or "assert " in block


@pytest.mark.parametrize(
    "page", [*PAGES, *sorted((ROOT / "docs").glob("*.md"))], ids=lambda page: page.name
)
def test_no_figure_is_missing(page: Path) -> None:
    assert not re.findall(r"^[A-Z]+_[A-Z]+$", page.read_text(encoding="utf-8"), re.MULTILINE)
