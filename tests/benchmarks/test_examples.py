"""Examples of pages are found, and lines that a command does not print are named."""

from pathlib import Path

from benchmarks.examples import Example, examples, missing

PAGE = """# Title

    $ python -c 'print("a  1"); print("b")' \\
        more
    a 1
    ─────

    ...

Text.

    python -c 'not an example'
    $ python -c 'shows nothing'
"""


def test_an_example_is_its_command_and_the_lines_below_it(tmp_path: Path) -> None:
    (tmp_path / "page.md").write_text(PAGE)
    (example,) = examples(tmp_path / "page.md")
    assert example.command == """python -c 'print("a  1"); print("b")' more"""
    assert [line for line in example.shown if line] == ["a 1", "..."]
    assert missing(example) == []


def test_lines_that_are_not_printed_are_named() -> None:
    example = Example("page.md", "python -c 'print(1)'", ["1", "", "2"])
    assert missing(example) == ["2"]
