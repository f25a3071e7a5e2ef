"""What a launcher or sweeper needs that a plain installation does not have."""

from collections.abc import Iterator
from contextlib import contextmanager

from fxpart.errors import SpecError

__all__ = ["needs"]


@contextmanager
def needs(launcher: str, package: str, extra: str) -> Iterator[None]:
    """Import `package` in here; without it, say in one line how to install it.

    Raises:
        SpecError: when the package is not installed.

    """
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != package:
            raise
        raise SpecError(
            f"hydra/launcher={launcher} needs {package}; pip install -c constraints.txt '.[{extra}]'"
        ) from error
