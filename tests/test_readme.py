"""The Python code in the README and in the docs runs unchanged."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = (
    ROOT / "README.md",
    *(ROOT / "docs" / f"{name}.md" for name in ("differences", "execution", "library")),
)
BLOCKS = [
    block
    for page in PAGES
    for block in re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    # A block with a name needs files beside it, and has its own test.
    if not block.startswith("# ")
]


def test_there_are_blocks_to_run() -> None:
    assert len(BLOCKS) == 8


@pytest.mark.parametrize("block", BLOCKS)
def test_a_block_runs(block: str, capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(block, "a page", "exec"), {"__name__": "__main__"})
    # A block without output contains assertions.
    assert capsys.readouterr().out.strip() or "assert " in block


@pytest.mark.parametrize(
    "page", [*PAGES, *sorted((ROOT / "docs").glob("*.md"))], ids=lambda page: page.name
)
def test_no_figure_is_missing(page: Path) -> None:
    assert not re.findall(r"^[A-Z]+_[A-Z]+$", page.read_text(encoding="utf-8"), re.MULTILINE)
