"""Atomic file writes: files are written under a temporary name, then renamed.

No reader ever sees a partial file, even if the writer is killed. Nothing is synced to disk before
the rename, so after a power cut a file may be the old one or empty.
"""

import os
import re
import secrets
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from hashlib import sha256
from pathlib import Path

from fxpart.errors import CacheError, SpecError

__all__ = [
    "is_alive",
    "new_folder",
    "remove_abandoned",
    "temporary_name",
    "whole_file",
    "write_whole",
]


# Temporary names, and removal of files left by killed writers.

_NAME = re.compile(r"\.([0-9a-f]{8})_(\d+)_[0-9a-f]{8}\.tmp(?:-wal|-shm|-journal)?")
"""The suffixes are those of sqlite's files beside a database."""
_UNKNOWN = "0" * 8
"""Placeholder for an unidentified machine, on which nothing is removed."""


def temporary_name() -> str:
    """Return a unique name made of the machine, the process and a random number.

    Its length does not depend on that of the file, so files with names of the maximal length can be
    written.
    """
    return f".{_machine()}_{os.getpid()}_{secrets.token_hex(4)}.tmp"


def remove_abandoned(folder: Path, *, below: bool = False) -> None:
    """Remove temporary files in `folder` left by dead processes of this machine.

    Files of live processes are kept, as are those of other machines, whose processes are unknown
    here. Entries that cannot be read or removed are skipped.

    Args:
        folder: the folder, which may be missing.
        below: whether to recurse into subfolders.

    """
    for entry in _entries(folder):
        match = _NAME.fullmatch(entry.name)
        if match and match[1] == _machine() != _UNKNOWN and not is_alive(int(match[2])):
            with suppress(OSError):
                if entry.is_dir(follow_symlinks=False):
                    shutil.rmtree(entry.path)
                else:
                    Path(entry.path).unlink()
        elif below and entry.is_dir(follow_symlinks=False):
            remove_abandoned(Path(entry.path), below=True)


def _entries(folder: Path) -> Iterator["os.DirEntry[str]"]:
    with suppress(OSError), os.scandir(folder) as entries:
        yield from list(entries)


@cache
def _machine() -> str:
    """Return a hash of the host or container within which process ids are unique.

    It changes with each boot, so files from before are kept.
    """
    try:
        started = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        numbers = str(Path("/proc/self/ns/pid").readlink())
    except OSError:  # not Linux
        return _UNKNOWN
    return sha256(f"{socket.gethostname()} {started} {numbers}".encode()).hexdigest()[:8]


def is_alive(process: int) -> bool:
    """Return whether a process of this machine, of any user, is alive."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):  # owned by another user
        return True
    return True


@contextmanager
def whole_file(path: Path, what: str, advice: str) -> Iterator[Path]:
    """Yield a temporary path to write to, which is renamed to `path` at the end.

    Parent folders are created. If the block fails, `path` is unchanged and the temporary file is
    removed.

    Args:
        path: the file.
        what: description for error messages, such as ``the profile to <folder>``.
        advice: remedy for error messages.

    Raises:
        CacheError: for any OSError, as ``cannot write <what>: <why>; <advice>``.

    """
    temporary = path.with_name(temporary_name())
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
        temporary.replace(path)
    except OSError as error:
        raise CacheError(f"cannot write {what}: {error.strerror or error}; {advice}") from error
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def write_whole(path: Path, content: str | bytes, what: str, advice: str) -> None:
    """Write `content` to `path` atomically; text is written as UTF-8 with unchanged line ends.

    Arguments and errors are those of `whole_file`.
    """
    data = content.encode() if isinstance(content, str) else content
    with whole_file(path, what, advice) as temporary:
        temporary.write_bytes(data)


# Atomic writes of folders.


@contextmanager
def new_folder(folder: Path, mark: str) -> Iterator[Path]:
    """Yield a temporary folder to write to, which replaces `folder` at the end.

    An existing folder is replaced if it is empty or contains a file named `mark`.

    Raises:
        SpecError: if `folder` exists with other content.
        CacheError: if it cannot be written.

    """
    if folder.exists() and not (folder / mark).is_file() and _holds_something(folder):
        raise SpecError(f"{folder} holds something else; give a folder that is new, or empty")
    fresh = folder.with_name(temporary_name())
    # If the process is killed during the swap, the old content remains under this name.
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
