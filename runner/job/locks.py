"""Locks that are released when the process that holds them ends, by ``kill -9`` too.

A lock is a byte of one file below ``outputs``, by ``fcntl``: it reaches over processes, and over
machines that share the folder.
"""

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from hashlib import sha256
from pathlib import Path

from fxpart.errors import CacheError
from fxpart.support.whole_file import temporary_name

__all__ = ["LOCKS_TAG", "Locks", "sweep_lock"]

LOCKS_TAG = "locks"
"""The tag of a run that names the locks of the folder that its sweep was started in."""

_BUSY = (errno.EACCES, errno.EAGAIN)
_UNSUPPORTED = (errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL)
_OFFSETS = 2**60
_SKIPPED, _NAME_BYTES = 8, 16
"""Where the random name begins in the file, and its size: files of earlier versions begin with a
count of the jobs that were begun, which changed."""
_HELD: set[tuple[int, str]] = set()
"""By file, the keys whose locks this process holds."""


def sweep_lock(sweep_key: str) -> str:
    """Return the key that the process with a whole sweep holds."""
    return f"sweep {sweep_key}"


class Locks:
    """The locks of all runs and sweeps that are started in one folder."""

    def __init__(self, root: Path) -> None:
        """Find them below ``outputs`` of `root`. Raises `CacheError` if that cannot be written."""
        self._file = _opened(root.resolve() / "outputs" / ".jobs.lock", os.getpid())

    @contextmanager
    def held(self, key: str, *, wait: bool = True) -> Iterator[bool]:
        """Hold the lock of `key`, after its holder if `wait`; yield whether it is this process's.

        It always is on a file system that has no locks. A lock that this process holds already is
        not given twice, and must not be waited for.
        """
        is_taken = not wait and (self._file, key) in _HELD  # its end here would lose it there
        is_ours = not is_taken and self._set(fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB), key)
        if not is_ours:
            yield False
            return
        _HELD.add((self._file, key))
        try:
            yield True
        finally:
            self._set(fcntl.LOCK_UN, key)
            _HELD.discard((self._file, key))

    def is_held_elsewhere(self, key: str) -> bool:
        """Return whether another process holds the lock of `key`."""
        if (self._file, key) in _HELD:
            return False  # to take it and give it back would lose it
        with self.held(key, wait=False) as is_ours:
            return not is_ours

    def _set(self, operation: int, key: str) -> bool:
        """Return False where another process is in the way."""
        try:
            fcntl.lockf(self._file, operation, 1, _byte(key))
        except OSError as error:
            if error.errno in _BUSY:
                return False
            if error.errno not in _UNSUPPORTED:
                raise
        return True

    @property
    def are_supported(self) -> bool:
        """Whether the file system has locks; without them no dead run is told from a live one."""
        try:
            fcntl.lockf(self._file, fcntl.LOCK_UN, 1, _byte("are they supported"))
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                raise
            return False
        return True

    @property
    def name(self) -> str:
        """What tells these locks from those of other folders, on whichever machine."""
        return os.pread(self._file, _NAME_BYTES, _SKIPPED).hex()


@cache
def _opened(path: Path, _process: int) -> int:
    """Return the file, opened once a process: to close any handle would drop all its locks."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            # Whoever is first names the file; it never appears without its name.
            fresh = path.with_name(temporary_name())
            try:
                fresh.write_bytes(bytes(_SKIPPED) + os.urandom(_NAME_BYTES))
                with suppress(FileExistsError):
                    os.link(fresh, path)
            finally:
                fresh.unlink(missing_ok=True)
        return os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise CacheError(
            f"cannot write {path}: {error.strerror}; make the folder writable, or start the sweep"
            " in another one"
        ) from error


def _byte(key: str) -> int:
    return int.from_bytes(sha256(key.encode()).digest()[:8], "big") % _OFFSETS
