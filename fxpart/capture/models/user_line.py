"""Which line of the user's own code an error came through."""

from pathlib import Path
from traceback import walk_tb

from fxpart.capture.models.own_imports import is_own

__all__ = ["own_line"]


def own_line(error: BaseException) -> str:
    """Return `` (mine.py:12)``, the innermost of the user's lines that led to `error`.

    Empty where none did. Of an error that another one caused, the cause's lines count.
    """
    step: BaseException | None = error
    found = ""
    while step is not None:
        for frame, line in walk_tb(step.__traceback__):
            path = Path(frame.f_code.co_filename)
            if path.is_file() and is_own(path):
                found = f" ({_shown(path)}:{line})"
        step = step.__cause__
    return found


def _shown(path: Path) -> str:
    here = Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)
