"""The named experiments, ``conf/experiment``: what each of them asks."""

import re
from textwrap import fill

from runner.paths import conf_dir, user_conf_dir

__all__ = ["experiments_text", "questions"]

FOLDER = "experiment"
"""The group of them."""

_QUESTION = re.compile(r"^question:[ \t]*(.+(?:\n[ \t]+.+)*)$", re.MULTILINE)


def questions() -> dict[str, str]:
    """Return the question of each named experiment by its name, those of the user's included.

    A file that asks none has an empty one. The shipped file wins, as where it is chosen.
    """
    found: dict[str, str] = {}
    for folder in (above / FOLDER for above in (conf_dir(), user_conf_dir()) if above):
        for path in sorted(folder.glob("**/*.yaml")):
            name = path.relative_to(folder).with_suffix("").as_posix()
            found.setdefault(name, _question(path.read_text(encoding="utf-8", errors="replace")))
    return dict(sorted(found.items()))


def _question(text: str) -> str:
    """Return the value of ``question``; YAML's own parser takes longer than all else in --help."""
    asked = _QUESTION.search(text)
    return " ".join(asked[1].split()).strip("'\"") if asked else ""


def experiments_text() -> str:
    """Return what ``--help`` lists: a line for each experiment, longer ones folded."""
    asked = questions()
    wide = max(map(len, asked), default=0) + 2
    return "".join(
        fill(f"{name:<{wide}}{question}".rstrip(), 100, subsequent_indent=" " * wide) + "\n"
        for name, question in asked.items()
    )
