"""The user's own files that a model's factory reads, noted while it reads them.

What a factory imports is found without running it (`fxpart.models.own_imports`); which files it
opens is known only once it has run. Python tells of each file that it opens (PEP 578); what a
library opens in code that is not Python's is not seen.
"""

import os
import sys
import tempfile
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from importlib.util import source_from_cache
from pathlib import Path
from threading import get_ident
from typing import Any

from fxpart.errors import CaptureError
from fxpart.file_digest import file_digest, file_stamp
from fxpart.models.own_imports import INSTALLED_IN, is_own

__all__ = ["files_read_by", "note_files", "noted_files"]

_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT
_OF_SYSTEM = (
    *(f"/{name}/" for name in ("proc", "sys", "dev", "etc", "run", "lib", "lib64", "bin")),
    *(f"/usr/{name}/" for name in ("lib", "share", "bin", "include")),
)
_CODE = (".py", ".pyc")


@dataclass(slots=True)
class _Watch:
    opened: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """By path, the stamp of each file when it was first opened to be read."""
    written: set[str] = field(default_factory=set)


_watches: dict[int, _Watch] = {}
"""By thread, what it is watched for."""
_read: dict[str, dict[Path, str]] = {}
"""By factory, what each file said that it has read in this process. A second call may read none of
them again: a module runs once, and code keeps what it has read."""


def files_read_by(factory: str | None) -> Mapping[Path, str]:
    """Return the `file_digest` of each file that the factory has read in this process."""
    return dict(sorted(_read.get(factory, {}).items())) if factory is not None else {}


def note_files(factory: str | None, files: Mapping[Path, str]) -> None:
    """Note what a graph that is kept was made of, when it is taken in place of a new one."""
    if factory is not None and files:
        known = _read.setdefault(factory, {})
        # What code in memory was made of stays what it was.
        known.update({path: digest for path, digest in files.items() if path not in known})


@contextmanager
def noted_files(factory: str, known: Collection[Path]) -> Iterator[None]:
    """Note the files that this thread reads in the block, as the factory's.

    Not those of the system, of installed packages and of caches, what the block itself writes, and
    `known`, the sources that are known without it.

    Raises `CaptureError` when a file changes meanwhile: nobody knows which of the two was read.
    """
    thread = get_ident()
    if thread in _watches:  # a part of a block that is watched already
        yield
        return
    _listen()
    watch = _watches[thread] = _Watch()
    try:
        yield
    finally:  # what fails has read files too
        del _watches[thread]
        changed = _note(factory, watch, known)
    if changed is not None:
        raise CaptureError(
            f"{changed} changed while a model was made of it; leave it as it is, and start again"
        )


def _note(factory: str, watch: _Watch, known: Collection[Path]) -> Path | None:
    """Note what was read; return a file that changed meanwhile, if one did."""
    changed = None
    aside = {file.resolve() for file in known}
    for name, stamp in watch.opened.items():
        path = _source(Path(name))
        if name in watch.written or path in aside or not _counts(path):
            continue
        with suppress(OSError):  # it is gone: the block's own, for a while
            if path == Path(name) and file_stamp(path) != stamp:
                changed = path
            _read.setdefault(factory, {})[path] = file_digest(path)
    return changed


def _source(path: Path) -> Path:
    """Return the source of a compiled module, any other file as it is."""
    if path.suffix == ".pyc":
        with suppress(ValueError):
            return Path(source_from_cache(str(path)))
    return path


def _counts(path: Path) -> bool:
    place = str(path)
    if place.startswith(_OF_SYSTEM) or place.startswith(_caches()):
        return False
    return path.is_file() and is_own(path)


@cache
def _caches() -> tuple[str, ...]:
    """Return how the paths of caches begin that packages keep for themselves."""
    home = Path.home()
    kept = os.environ.get("XDG_CACHE_HOME") or home / ".cache"
    environment = [sys.prefix] if sys.prefix != sys.base_prefix else []
    folders = (kept, home / ".config", home / ".triton", *environment)
    inductor = Path(tempfile.gettempdir()) / "torchinductor_"
    return (*(f"{Path(folder)}{os.sep}" for folder in folders), str(inductor))


@cache
def _listen() -> None:
    """Hear of each file that is opened; a hook cannot be taken away again."""
    sys.addaudithook(_heard)


def _heard(event: str, args: tuple[Any, ...]) -> None:
    if event != "open" or not _watches:
        return
    watch = _watches.get(get_ident())
    if watch is None:
        return
    # Whatever goes wrong here would go wrong in the code that opens the file.
    with suppress(Exception):
        place, _, flags = args
        if isinstance(place, int):
            return  # it was opened before
        name = os.fsdecode(place)
        if any(folder in name for folder in INSTALLED_IN):
            return  # thousands, while torch is imported
        path = os.path.realpath(name)
        if flags & _WRITING:
            watch.written.add(path)
        elif path not in watch.opened and not (path.endswith(_CODE) and _for_its_lines()):
            watch.opened[path] = file_stamp(Path(path))


def _for_its_lines() -> bool:
    """Return whether source is read for a traceback: not to be run."""
    frame = sys._getframe(2)
    for _ in range(3):
        if frame.f_globals.get("__name__") == "linecache":
            return True
        if frame.f_back is None:
            break
        frame = frame.f_back
    return False
