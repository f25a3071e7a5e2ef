"""``python -m benchmarks.examples``: run the examples of the README and the docs.

An example is an indented block that begins with ``$ python``. Its command runs in an empty folder,
and each line below it must be among those printed; ``...`` stands for lines left out. Spaces and
the rules of tables do not count. Measured times differ from machine to machine. The exit code is 1
if an example shows a line that is not printed.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_ROOT = Path(__file__).resolve().parent.parent
_INDENT = "    "
_PROMPT = f"{_INDENT}$ "
_RULE = re.compile(r"[─\s]*")


class Example(NamedTuple):
    """A command and the lines shown below it."""

    page: str
    command: str
    shown: list[str]


def examples(page: Path) -> Iterator[Example]:
    """Yield the examples of a page, with continued lines joined."""
    example: Example | None = None
    for line in re.sub(r" *\\\n *", " ", page.read_text(encoding="utf-8")).splitlines():
        if example and (not line or line.startswith(_INDENT)) and not line.startswith(_PROMPT):
            example.shown.append(_plain(line))
            continue
        if example and any(example.shown):
            yield example
        command = line.removeprefix(_PROMPT) if line.startswith(f"{_PROMPT}python ") else ""
        example = Example(page.name, command, []) if command else None
    if example and any(example.shown):
        yield example


def _plain(line: str) -> str:
    return "" if _RULE.fullmatch(line) else " ".join(line.split())


def missing(example: Example) -> list[str]:
    """Return the lines of an example that its command does not print."""
    command = example.command.replace("python", sys.executable, 1)
    # Tables are shown as wide as in a pipe.
    environment = {key: value for key, value in os.environ.items() if key != "COLUMNS"}
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=folder,
            env={**environment, "PYTHONPATH": str(_ROOT)},
            check=False,
            capture_output=True,
            text=True,
        )
    printed = {_plain(line) for line in (done.stdout + done.stderr).splitlines()}
    return [line for line in example.shown if line not in {*printed, "", "..."}]


def main() -> int:
    """Run the examples of the pages named, and print those that show other lines."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("pages", nargs="*", help="such as serving.md; all by default")
    named = {Path(page).name for page in parser.parse_args().pages}
    pages = (_ROOT / "README.md", *sorted((_ROOT / "docs").glob("*.md")))
    if unknown := named - {page.name for page in pages}:
        parser.error(f"there is no page {', '.join(sorted(unknown))}")
    code = 0
    for page in pages:
        for example in examples(page) if not named or page.name in named else ():
            unlike = missing(example)
            code |= bool(unlike)
            print(
                f"{'differs' if unlike else 'same   '}  {page.name}  {example.command}", flush=True
            )
            for line in unlike:
                print(f"    not printed: {line}", flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
