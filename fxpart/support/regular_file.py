"""Read files named by users, refusing devices, pipes and sockets, which may never end."""

import errno
import stat
from os import stat_result
from pathlib import Path

__all__ = ["read_regular", "regular_status"]


def regular_status(path: Path) -> stat_result:
    """Return the status of the regular file at `path`, without opening it.

    Raises:
        OSError: also if it is not a regular file, or the name is invalid.

    """
    try:
        status = path.stat()
    except ValueError as error:  # a NUL in the name
        raise OSError(errno.EINVAL, str(error), str(path)) from error
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, "Is a directory", str(path))
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "it is a device, a pipe or a socket", str(path))
    return status


def read_regular(path: Path) -> bytes:
    """Return the content of the regular file at `path`. Raises `OSError` as `regular_status`."""
    regular_status(path)
    return path.read_bytes()
