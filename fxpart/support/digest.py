"""Equal things as equal text, and the hash of it: how configurations and models are told apart."""

import hashlib
import json
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

__all__ = ["LARGE_BYTES", "file_digest", "file_stamp", "stable_digest"]


def stable_digest(parts: Mapping[str, object]) -> str:
    """Return the SHA-256 of `parts` as JSON with sorted keys, as 64 hex digits.

    Whatever JSON has no word for counts as what `str` says of it. Keys count as text: YAML knows
    numbers too, and the two cannot be sorted.
    """
    text = json.dumps(_text_keys(parts), sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def _text_keys(item: object) -> object:
    if isinstance(item, Mapping):
        return {str(key): _text_keys(value) for key, value in item.items()}
    return [_text_keys(value) for value in item] if isinstance(item, list | tuple) else item


# Digests of files.

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
