"""Hold the lock of a file, so that processes take turns."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

__all__ = ["file_lock"]


@contextmanager
def file_lock(path: Path) -> Iterator[None]:
    """Hold the lock of `path`, which is created; where files have no locks, nothing is held.

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
            # Closing the file releases the lock, as the end of the process does.
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
