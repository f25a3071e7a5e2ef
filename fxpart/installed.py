"""Which version of a package is installed."""

from functools import cache
from importlib.metadata import PackageNotFoundError, version

__all__ = ["installed_version"]


@cache
def installed_version(package: str) -> str | None:
    """Return the version of a package without importing it, None if it is not installed.

    Found out once in a process, since the file that says it takes a millisecond to read.
    """
    try:
        return version(package)
    except PackageNotFoundError:
        return None
