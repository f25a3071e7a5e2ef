"""Errors raised only by the runner; the library's are in `fxpart.errors`."""

from fxpart.errors import FxpartError

__all__ = ["TrackingError", "message_of"]


class TrackingError(FxpartError, RuntimeError):
    """A store of runs that cannot be reached, read or written."""


def message_of(error: BaseException) -> str:
    """Return the message of an error, on one line."""
    return " ".join(str(error).split())
