"""Errors that only the runner raises; those of the library are in `fxpart.errors`."""

from fxpart.errors import FxpartError

__all__ = ["TrackingError"]


class TrackingError(FxpartError, RuntimeError):
    """A store of runs that cannot be reached, read or written."""
