"""docs/extending.md: its files are written, and its commands run, in the order of the page."""

import re
import shlex
from pathlib import Path

import pytest

from tests.runner.command import run

PAGE = Path(__file__).resolve().parents[2] / "docs" / "extending.md"
_FILE = re.compile(r"```(?:python|yaml)\n# (\S+)\n(.*?)```", re.DOTALL)
_COMMAND = re.compile(r"^    python (.+)$", re.MULTILINE)
_SHOWS = {"devices=2xnpu": "npu", "devices=bridged": "npu", "mode=custom": "2 partitions on 2 of"}


def _write_files(folder: Path) -> None:
    for name, text in _FILE.findall(PAGE.read_text(encoding="utf-8")):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def test_each_kind_of_thing_has_a_file() -> None:
    files = [name for name, _ in _FILE.findall(PAGE.read_text(encoding="utf-8"))]
    assert [name.partition("/")[2].partition("/")[0] or name for name in files] == [
        "accelerator",
        "transfer_rate",
        "devices",
        "mine.py",
        "model",
        "halves.py",
        "mode",
        "balance.py",
    ]


@pytest.mark.usefixtures("store")
def test_the_page_is_carried_out(folder: Path) -> None:
    _write_files(folder)
    commands = [shlex.split(text) for text in _COMMAND.findall(PAGE.read_text(encoding="utf-8"))]
    assert len(commands) >= 6
    for words in commands:
        if words[:2] == ["-m", "runner"]:
            done = run(folder, *words[2:])
            assert done.code == 0, (words, done.err)
            for arguments, shown in _SHOWS.items():
                assert arguments not in words or shown in done.out, (words, done.out)
        else:
            script = (folder / words[0]).read_text()
            done = run(folder, program=("-c", script))
            assert done.code == 0, done.err
            assert re.search(r"^\S*towers\S*: balance [01]\.\d\d$", done.out, re.MULTILINE), (
                done.out
            )


_BROKEN = """
import sys
from fxpart.errors import InfeasibleError
def raises(problem):
    return problem.no_such_thing
def leaves(problem):
    sys.exit(0)
def short(problem):
    return [0]
def full(problem):
    raise InfeasibleError("no room for this")
"""


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("broken:raises", "mode.function=broken:raises failed (broken.py:5): AttributeError:"),
        ("broken:leaves", "mode.function=broken:leaves failed (broken.py:7): SystemExit"),
        ("broken:short", "mode.function placed 1 operators, the model has 12"),
        ("broken:full", "no room for this"),
        ("broken:rases", "mode.function=broken:rases: broken has no rases; nearest: raises"),
        ("brokn:raises", "mode.function=brokn:raises: there is no module brokn; nearest: broken"),
        ("broken", "mode.function=broken is not of the form package.module:function"),
        ("os:getpid", "mode.function=os:getpid cannot be called with the problem alone"),
    ],
)
def test_a_failing_mode_of_a_user_is_one_line(folder: Path, function: str, message: str) -> None:
    (folder / "broken.py").write_text(_BROKEN)
    arguments = ["model=custom", "model.factory=tiny:build", "reserve=none", "tracking=none"]
    done = run(folder, *arguments, "mode=custom", f"mode.function={function}", "devices=2x1mb")
    assert done.code == 2
    assert done.error.startswith(message)


def test_a_mode_without_a_function_is_refused(folder: Path) -> None:
    done = run(folder, "model=gpt2", "mode=custom", "tracking=none")
    assert done.code == 2
    assert done.error.startswith("mode.function is needed; give mode.function=")
