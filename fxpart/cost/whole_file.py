"""A file that a reader sees whole or not at all: written under another name, then renamed."""

import secrets
from contextlib import suppress
from pathlib import Path

from fxpart.errors import CacheError

__all__ = ["write_whole"]


def write_whole(path: Path, text: str, what: str) -> None:
    """Write `text` to `path`; its folder is made if it is not there.

    Raises:
        CacheError: when the folder cannot be written; it says `what` was to be kept.

    """
    temporary = path.with_name(f".{path.stem}.{secrets.token_hex(8)}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        raise CacheError(
            f"cannot write {what} to {path.parent}: {error.strerror or error};"
            " make the folder writable, or name another one"
        ) from error
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
