"""Where a result came from: versions, commit, and the command that made it."""

import getpass
import platform
import shlex
import subprocess
import sys
from contextlib import suppress
from functools import cache
from pathlib import Path

from fxpart.installed import installed_version

__all__ = ["environment_tags"]

_PACKAGES = ("fxpart", "torch", "transformers", "mlflow")
_GIT_S = 2.0


def environment_tags() -> dict[str, str]:
    """Return tags for a run: versions, user, source, and git's state of the working directory.

    What cannot be found out is left out. Git is asked once in a process: its state then is that of
    the code that runs.
    """
    tags = {
        "mlflow.source.name": _command(),
        "mlflow.source.type": "LOCAL",
        "python_version": platform.python_version(),
    }
    for package in _PACKAGES:
        found = installed_version(package)
        if found:
            tags[f"{package}_version"] = found
    with suppress(KeyError, OSError):  # a container may have no such user
        tags["mlflow.user"] = getpass.getuser()
    return tags | _git_tags(Path.cwd())


def _command() -> str:
    """Return the program that was started, short enough for a column."""
    program = Path(sys.argv[0] or "python")
    if program.name == "__main__.py":
        return f"python -m {program.parent.name}"
    return shlex.quote(program.name)


@cache
def _git_tags(root: Path) -> dict[str, str]:
    state = _git(root, "status", "--porcelain=v2", "--branch", "--untracked-files=no")
    if state is None:
        return {}
    tags: dict[str, str] = {}
    changed = False
    for line in state.splitlines():
        match line.split(" ", 2):
            case ["#", "branch.oid", oid] if oid != "(initial)":
                tags["mlflow.source.git.commit"] = oid
            case ["#", "branch.head", branch] if branch != "(detached)":
                tags["mlflow.source.git.branch"] = branch
            case ["#", *_]:
                continue
            case _:
                changed = True
    return {**tags, "git_dirty": str(changed).lower()} if tags else {}


def _git(root: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(root), "--no-optional-locks", *arguments],
            capture_output=True,
            text=True,
            timeout=_GIT_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout
