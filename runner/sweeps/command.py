"""What a sweep was asked for, as it is typed."""

import shlex
from collections.abc import Sequence

__all__ = ["command_line", "without_secrets"]

_SECRET = "tracking."
"""Where runs are kept is no part of what they are, and may hold a password."""


def without_secrets(overrides: Sequence[str]) -> tuple[str, ...]:
    """Return `overrides` but for those of the tracking."""
    return tuple(one for one in overrides if not one.lstrip("+").startswith(_SECRET))


def command_line(overrides: Sequence[str]) -> str:
    """Return the command that runs the sweep of these overrides, its tracking left out."""
    return " ".join(["python -m runner -m", *map(shlex.quote, without_secrets(overrides))])
