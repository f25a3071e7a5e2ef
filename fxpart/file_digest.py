"""What a file says, as a digest, and when somebody wrote to it."""

import hashlib
from functools import lru_cache
from pathlib import Path

__all__ = ["LARGE_BYTES", "file_digest", "file_stamp"]

LARGE_BYTES = 64 * 2**20
"""From here on a file, weights most likely, is known by its size and time: reading it takes long.
"""


def file_stamp(path: Path) -> tuple[int, ...]:
    """Return what changes whenever somebody writes to the file. Raises `OSError`."""
    is_now = path.stat()
    return (is_now.st_mtime_ns, is_now.st_ctime_ns, is_now.st_size, is_now.st_ino)


def file_digest(path: Path) -> str:
    """Return the SHA-256 of what the file says, in hex; it is read again only after a change.

    Of a file of `LARGE_BYTES` or more it is that of its size and the time of its last change.
    Raises `OSError`.
    """
    return _digest(path, file_stamp(path))


@lru_cache(maxsize=1024)
def _digest(path: Path, stamp: tuple[int, ...]) -> str:
    mtime_ns, _, size_bytes, _ = stamp
    if size_bytes >= LARGE_BYTES:
        return hashlib.sha256(f"{size_bytes} bytes, {mtime_ns} ns".encode()).hexdigest()
    return hashlib.sha256(path.read_bytes()).hexdigest()
