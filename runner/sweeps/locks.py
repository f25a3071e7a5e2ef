"""Who runs which job: one lock for each key, which falls with the process that holds it.

A run that MLflow calls RUNNING is at work if its key is locked, and was cut off if it is not. The
locks are bytes of one file, by ``fcntl``: they reach over processes, over machines that share the
folder, and not beyond the life of their process, ``kill -9`` included.
"""

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from hashlib import sha256
from pathlib import Path

from fxpart.errors import CacheError

__all__ = ["Locks"]

_BUSY = (errno.EACCES, errno.EAGAIN)
_UNSUPPORTED = (errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL)
_OFFSETS = 2**60


@cache
def _opened(path: Path, _process: int) -> int:
    """Return the file, opened once a process: to close any handle would drop all its locks."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise CacheError(
            f"cannot write {path}: {error.strerror}; make the folder writable, or start the sweep"
            " in another one"
        ) from error


class Locks:
    """The locks of all sweeps that are started in one folder."""

    def __init__(self, root: Path) -> None:
        """Find them below ``outputs`` of `root`. Raises `CacheError` if that cannot be written."""
        self._file = _opened(root.resolve() / "outputs" / ".jobs.lock", os.getpid())

    def take(self, key: str, *, wait: bool = False) -> bool:
        """Take the lock of `key`, after its holder if `wait`; return whether it is ours now.

        On a file system that has no locks it is always ours.
        """
        return self._set(fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB), key)

    def release(self, key: str) -> None:
        """Give the lock of `key` back."""
        self._set(fcntl.LOCK_UN, key)

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

    def join(self, group: str) -> None:
        """Be one of the processes of `group` from now on."""
        self._set(fcntl.LOCK_SH, group)

    def is_alone(self, group: str) -> bool:
        """Return whether no other process is in `group`, of which this one is."""
        # Ours becomes exclusive if there is no other, and stays shared if there is one.
        alone = self._set(fcntl.LOCK_EX | fcntl.LOCK_NB, group)
        if alone:
            self._set(fcntl.LOCK_SH, group)
        return alone

    def is_held_elsewhere(self, key: str) -> bool:
        """Return whether another process holds the lock of `key`; not to be asked of one's own."""
        if not self.take(key):
            return True
        self.release(key)
        return False

    @contextmanager
    def held(self, key: str) -> Iterator[bool]:
        """Hold the lock of `key`; yield whether that took waiting for another process."""
        waited = not self.take(key)
        if waited:
            self.take(key, wait=True)
        try:
            yield waited
        finally:
            self.release(key)


def _byte(key: str) -> int:
    return int.from_bytes(sha256(key.encode()).digest()[:8], "big") % _OFFSETS
