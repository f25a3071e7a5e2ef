"""Names of files that are being written, and removing those whose writer was killed meanwhile."""

import os
import re
import secrets
import shutil
import socket
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from hashlib import sha256
from pathlib import Path

__all__ = ["remove_abandoned", "temporary_name"]

_NAME = re.compile(r"\.([0-9a-f]{8})_(\d+)_[0-9a-f]{8}\.tmp(?:-wal|-shm|-journal)?")
"""The ends are those of files that sqlite keeps beside a database."""
_UNKNOWN = "0" * 8
"""Where nothing tells this machine from others: then nothing is removed."""


def temporary_name() -> str:
    """Return a name that nobody else has: of this machine, this process and chance.

    It is short, whatever the file is to be called: a name that is as long as names may be can still
    be written.
    """
    return f".{_machine()}_{os.getpid()}_{secrets.token_hex(4)}.tmp"


def remove_abandoned(folder: Path, *, below: bool = False) -> None:
    """Remove what processes of this machine that are dead were writing in `folder`.

    What a live process writes stays, and what another machine does, of whose processes nothing is
    known here. What cannot be removed, or read, is left alone.

    Args:
        folder: it may be missing.
        below: whether to look into the folders in it too.

    """
    for entry in _entries(folder):
        found = _NAME.fullmatch(entry.name)
        if found and found[1] == _machine() != _UNKNOWN and not _is_alive(int(found[2])):
            with suppress(OSError):
                if entry.is_dir(follow_symlinks=False):
                    shutil.rmtree(entry.path)
                else:
                    Path(entry.path).unlink()
        elif below and entry.is_dir(follow_symlinks=False):
            remove_abandoned(Path(entry.path), below=True)


def _entries(folder: Path) -> Iterator["os.DirEntry[str]"]:
    with suppress(OSError), os.scandir(folder) as entries:
        yield from list(entries)


@cache
def _machine() -> str:
    """Return a hash of what numbers of processes are unique in: a host, or a container on it.

    Since it was started: what is left of before stays.
    """
    try:
        started = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        numbers = str(Path("/proc/self/ns/pid").readlink())
    except OSError:  # not Linux
        return _UNKNOWN
    return sha256(f"{socket.gethostname()} {started} {numbers}".encode()).hexdigest()[:8]


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):  # somebody else's
        return True
    return True
