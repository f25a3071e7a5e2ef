"""What a sweep was asked for, as it is typed."""

import shlex
from collections.abc import Sequence

from runner.identity import without_elsewhere

__all__ = ["command_line"]


def command_line(overrides: Sequence[str]) -> str:
    """Return the command that runs the sweep of these overrides, its tracking left out."""
    # What is for Hydra stays: another sweeper makes another sweep.
    kept = without_elsewhere(overrides, ("tracking",))
    return " ".join(["python -m runner -m", *map(shlex.quote, kept)])
