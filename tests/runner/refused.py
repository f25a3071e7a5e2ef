"""The error line of a command that is refused."""

from collections.abc import Callable

import pytest

from runner.cli.composing import composing
from runner.cli.mistakes import explain

__all__ = ["refused_line"]


def refused_line(compose: Callable[[], object]) -> str:
    """Return the error line for what `compose` raises."""
    with pytest.raises(Exception) as caught, composing():  # noqa: PT011 - Hydra's, whichever
        compose()
    line = explain(caught.value)
    assert line is not None
    assert "\n" not in line
    return line
