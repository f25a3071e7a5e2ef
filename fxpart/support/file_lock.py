"""Hold the lock of a file, so that processes take turns."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

__all__ = ["file_lock"]


@contextmanager
def file_lock(path: Path) -> Iterator[None]:
    """Hold the lock of `path`, which is created; on systems without file locks, hold nothing.

    Raises:
        OSError: if the file cannot be created.

    """
    try:
        import fcntl
    except ImportError:
        yield
        return
    with path.open("w") as lock:
        with suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            yield
        finally:
            # Closing the file is not enough: a process forked meanwhile may have it open.
            with suppress(OSError):
                fcntl.flock(lock, fcntl.LOCK_UN)
