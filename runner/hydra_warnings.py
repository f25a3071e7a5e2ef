"""What Hydra warns of: a folder that is missing is a mistake, what was typed is no surprise."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["heeded_warnings"]

_NO_FOLDER = r"provider=.* is not available"
_MODE = r"\s*Running Hydra app with --multirun, overriding"
"""Said for -m where a file says hydra.mode: RUN."""


@contextmanager
def heeded_warnings() -> Iterator[None]:
    """Raise the one as an error, and leave the other out."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=_NO_FOLDER, category=UserWarning)
        warnings.filterwarnings("ignore", message=_MODE, category=UserWarning)
        yield
