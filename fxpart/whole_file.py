"""Files that are whole or absent: written under another name, then renamed.

A reader, or a run that was killed half-way, never sees the first half of a file. Nothing is forced
to the disk before the rename: after a power cut a file may be the old one or empty.
"""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from fxpart.errors import CacheError
from fxpart.temporary_name import temporary_name

__all__ = ["whole_file", "write_whole"]


@contextmanager
def whole_file(path: Path, what: str, advice: str) -> Iterator[Path]:
    """Yield a name to write to, beside `path`; what is there at the end becomes `path`.

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
