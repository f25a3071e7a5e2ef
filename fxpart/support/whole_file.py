"""Files that are whole or absent: written under another name, then renamed.

A reader, or a run that was killed half-way, never sees the first half of a file. Nothing is forced
to the disk before the rename: after a power cut a file may be the old one or empty.
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


# Temporary names, and removing the files of writers that were killed.

_NAME = re.compile(r"\.([0-9a-f]{8})_(\d+)_[0-9a-f]{8}\.tmp(?:-wal|-shm|-journal)?")
"""The ends are those of files that sqlite keeps beside a database."""
_UNKNOWN = "0" * 8
"""Where nothing tells this machine from others: then nothing is removed."""


def temporary_name() -> str:
    """Return a unique name, made of the machine, the process and a random number.

    It is short, whatever the file is to be called: a name that is as long as names may be can still
    be written.
    """
    return f".{_machine()}_{os.getpid()}_{secrets.token_hex(4)}.tmp"


def remove_abandoned(folder: Path, *, below: bool = False) -> None:
    """Remove what processes of this machine that are dead were writing in `folder`.

    What a live process writes stays, and what another machine does, of whose processes nothing is
    known here. What cannot be removed, or read, is left alone.

    Args:
        folder: it may be missing.
        below: whether to look into the folders in it too.

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
    """Return a hash of the host, or the container, in which process ids are unique.

    It changes with each boot: files from before are kept.
    """
    try:
        started = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        numbers = str(Path("/proc/self/ns/pid").readlink())
    except OSError:  # not Linux
        return _UNKNOWN
    return sha256(f"{socket.gethostname()} {started} {numbers}".encode()).hexdigest()[:8]


def is_alive(process: int) -> bool:
    """Return whether a process of this machine, of whichever user, has not ended."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):  # of another program
        return True
    return True


@contextmanager
def whole_file(path: Path, what: str, advice: str) -> Iterator[Path]:
    """Yield a name to write to, beside `path`; the file with that name becomes `path` at the end.

    Folders above it are made. When the block fails, `path` stays as it was, and nothing else stays.

    Args:
        path: the file.
        what: the file as an error calls it, such as ``the profile to <folder>``.
        advice: what to change when it cannot be written.

    Raises:
        CacheError: for any OSError: ``cannot write <what>: <why>; <advice>``.

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
    """Write `content` to `path`, text as UTF-8 with its line ends as they are.

    Arguments and errors are those of `whole_file`.
    """
    data = content.encode() if isinstance(content, str) else content
    with whole_file(path, what, advice) as temporary:
        temporary.write_bytes(data)


# Folders that are whole or absent.


@contextmanager
def new_folder(folder: Path, mark: str) -> Iterator[Path]:
    """Yield a folder to write into; it takes the place of `folder` when all is written.

    An existing folder with a file called `mark` is of the same kind and is replaced.

    Raises:
        SpecError: when `folder` exists and is of another kind.
        CacheError: when it cannot be written.

    """
    if folder.exists() and not (folder / mark).is_file() and _holds_something(folder):
        raise SpecError(f"{folder} holds something else; give a folder that is new, or empty")
    fresh = folder.with_name(temporary_name())
    # After a kill here the old content is left under this name.
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
