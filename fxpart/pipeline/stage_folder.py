"""A folder that appears whole or not at all."""

import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fxpart.errors import CacheError, SpecError
from fxpart.temporary_name import temporary_name

__all__ = ["new_folder"]


@contextmanager
def new_folder(folder: Path, mark: str) -> Iterator[Path]:
    """Yield a folder to write into; it takes the place of `folder` when all is written.

    A folder that is there and has a file called `mark` is of the same kind and is replaced.

    Raises:
        SpecError: when `folder` is there and is of another kind.
        CacheError: when it cannot be written.

    """
    if folder.exists() and not (folder / mark).is_file() and _holds_something(folder):
        raise SpecError(f"{folder} holds something else; give a folder that is new, or empty")
    fresh = folder.with_name(temporary_name())
    # Whoever is killed here leaves what was there before under a name that says so.
    old = folder.with_name(f".{folder.name}.{secrets.token_hex(8)}.old")
    try:
        fresh.mkdir(parents=True)
        yield fresh
        if folder.exists():
            folder.rename(old)
        _take_place(fresh, folder, old)
    except OSError as error:
        raise CacheError(
            f"cannot write {folder}: {error.strerror or error}; give a folder that is writable and"
            " has room"
        ) from error
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)


def _take_place(fresh: Path, folder: Path, old: Path) -> None:
    try:
        fresh.rename(folder)
    except OSError:
        if old.exists():
            old.rename(folder)
        raise


def _holds_something(folder: Path) -> bool:
    return not folder.is_dir() or any(folder.iterdir())
