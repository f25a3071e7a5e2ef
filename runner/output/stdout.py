"""Text on stdout, which may be closed by its reader or on a full disk: neither ends the work."""

import os
import sys
from contextlib import suppress
from typing import TextIO

__all__ = ["discard", "flush", "is_complete", "stop_printing", "write"]

_errors: list[OSError] = []
"""Why stdout refused text, if it did."""


def write(text: str) -> None:
    """Write `text` to stdout at once; what it refuses is lost.

    Raises:
        BrokenPipeError: if its reader has closed it.

    """
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        stop_printing(error)


def flush() -> None:
    """Flush stdout, as `write` does, and stderr.

    Python's own flush at exit prints a traceback or, for stderr, makes the exit code 120.
    """
    write("")
    try:
        sys.stderr.flush()
    except BrokenPipeError:
        pass
    except OSError:
        discard(sys.stderr)


def stop_printing(error: OSError) -> None:
    """Say on stderr that stdout refuses text, and discard all further text."""
    _errors.append(error)
    discard(sys.stdout)
    with suppress(OSError, ValueError):  # stderr may be on the same disk
        sys.stderr.write(
            f"error: stdout: {error.strerror}; the rest of the output is lost: free some space, or"
            " redirect it elsewhere\n"
        )


def is_complete() -> bool:
    """Return whether stdout took all text so far."""
    return not _errors


def discard(stream: TextIO) -> None:
    """Redirect `stream` to /dev/null, so that neither later text nor the flush at exit fails."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, stream.fileno())
    os.close(null)
