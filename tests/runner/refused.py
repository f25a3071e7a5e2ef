"""What a user is told of a command line that is refused."""

from collections.abc import Callable

import pytest

from runner.cli.mistakes import explain

__all__ = ["refused_line"]


def refused_line(make: Callable[[], object]) -> str:
    """Return the one line that is said of what `make` raises."""
    with pytest.raises(Exception) as caught:  # noqa: PT011 - of Hydra's, whichever
        make()
    line = explain(caught.value)
    assert line is not None
    assert "\n" not in line
    return line
