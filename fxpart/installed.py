"""Which version of a package is installed."""

from importlib.metadata import PackageNotFoundError, version

__all__ = ["installed_version"]


def installed_version(package: str) -> str | None:
    """Return the version of a package without importing it, None if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None
