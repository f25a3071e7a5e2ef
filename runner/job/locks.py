"""Locks that are released when the process holding them ends, even by ``kill -9``.

A lock is an ``fcntl`` lock on one byte of a file below ``outputs``. It works across processes, and
across machines that share the folder.
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
"""The tag of a run that names the locks of the folder its sweep was started in."""

_BUSY = (errno.EACCES, errno.EAGAIN)
_UNSUPPORTED = (errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL)
_OFFSETS = 2**60
_SKIPPED, _NAME_BYTES = 8, 16
"""Offset of the random name in the file, and its size. Files of earlier versions start with a
changing count of jobs."""
_HELD: set[tuple[int, str]] = set()
"""The locks held by this process, as pairs of file descriptor and key."""


def sweep_lock(sweep_key: str) -> str:
    """Return the key locked by the process that leads a sweep."""
    return f"sweep {sweep_key}"


class Locks:
    """The locks of all runs and sweeps started in one folder."""

    def __init__(self, root: Path) -> None:
        """Open the locks in ``outputs`` below `root`. Raises `CacheError` if it is not writable."""
        self._file = _opened(root.resolve() / "outputs" / ".jobs.lock", os.getpid())

    @contextmanager
    def held(self, key: str, *, wait: bool = True) -> Iterator[bool]:
        """Acquire the lock of `key`, waiting for it if `wait`, and yield whether it was acquired.

        On a file system without locks it always is. Locks are not reentrant: without `wait`, one
        that this process already holds yields False; waiting for it is an error.
        """
        is_taken = not wait and (self._file, key) in _HELD  # releasing it would end that lock
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
            return False  # acquiring and releasing it here would release it there
        with self.held(key, wait=False) as is_ours:
            return not is_ours

    def _set(self, operation: int, key: str) -> bool:
        """Lock or unlock; return False if another process holds the lock."""
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
        """Whether the file system has locks; without them dead and live runs look the same."""
        try:
            fcntl.lockf(self._file, fcntl.LOCK_UN, 1, _byte("are they supported"))
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                raise
            return False
        return True

    @property
    def name(self) -> str:
        """The unique name of these locks, the same on all machines that share the folder."""
        return os.pread(self._file, _NAME_BYTES, _SKIPPED).hex()


@cache
def _opened(path: Path, _process: int) -> int:
    """Open the file once per process: closing any descriptor would release all its locks."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            # The first process names the file, which appears with its name complete.
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
