"""The user's own files that a model's factory reads, noted while it reads them.

What a factory imports is found without running it (`fxpart.capture.models.own_imports`); which
files it opens is known only once it has run. Python tells of each file that it opens (PEP 578);
what a library opens in code that is not Python's is not seen.
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
from threading import Lock
from typing import Any

from fxpart.capture.models.own_imports import INSTALLED_IN, is_own
from fxpart.errors import CaptureError
from fxpart.support.digest import file_digest

__all__ = ["CHANGED", "files_read_by", "note_files", "noted_files"]

CHANGED = "changed"
"""In place of a digest, of a file that has said two things and was not read the last time: code may
have kept the one or the other. It never stands."""
_WRITING = os.O_WRONLY | os.O_RDWR
_OF_SYSTEM = (
    *(f"/{name}/" for name in ("proc", "sys", "dev", "etc", "run", "lib", "lib64", "bin")),
    *(f"/usr/{name}/" for name in ("lib", "share", "bin", "include")),
)
_FOR_DATA = tuple(f"/{name}/" for name in ("dev/shm", "run/media", "run/user"))
"""Folders below those in which people keep files of their own."""
_OF_PYTHON = ("lib", "lib64", "bin", "include", "share")
_CODE = (".py", ".pyc")


@dataclass(slots=True, eq=False)
class _Watch:
    opened: dict[str, str] = field(default_factory=dict)
    """By path, what each file said when it was first opened to be read."""
    written: set[str] = field(default_factory=set)
    is_read_by_us: bool = False


@dataclass(slots=True)
class _Factory:
    sources: frozenset[Path] = frozenset()
    files: dict[Path, str] = field(default_factory=dict)
    """What it has ever read."""
    latest: dict[Path, str] = field(default_factory=dict)
    """What it has read the last time."""


_watches: list[_Watch] = []
"""Of the blocks that are under way, one inside the other, or in threads beside each other."""
_lock = Lock()
_read: dict[str, _Factory] = {}
"""By factory, what it has read in this process. A second call may read none of it again: a module
runs once, and code keeps what it has read."""


def files_read_by(factory: str | None) -> Mapping[Path, str]:
    """Return the `file_digest` of each file that the factory has read in this process.

    And of those that factories have read that share a module with it: the module may have kept it.
    """
    mine = _read.get(factory or "")
    if mine is None:
        return {}
    found: dict[Path, str] = {}
    for other in (mine, *(one for one in _read.values() if one.sources & mine.sources)):
        _add(found, other.files)
    # What was read again is no longer what was read before.
    return dict(sorted((found | mine.latest).items()))


def note_files(factory: str | None, files: Mapping[Path, str]) -> None:
    """Note what a graph that is kept was made of, when it is taken in place of a new one."""
    if factory is not None and files:
        with _lock:
            mine = _read.setdefault(factory, _Factory())
            mine.latest = dict(files)
            _add(mine.files, files)


def _add(found: dict[Path, str], files: Mapping[Path, str]) -> None:
    for path, digest in files.items():
        # Nobody knows which of the two is still in somebody's memory.
        found[path] = digest if found.get(path, digest) == digest else CHANGED


@contextmanager
def noted_files(factory: str, sources: Collection[Path]) -> Iterator[None]:
    """Note the files that are read in the block, as the factory's.

    Not those of the system, of installed packages and of caches, nor `sources`, which are known
    without it.

    Raises `CaptureError` when a file is changed meanwhile by somebody else: nobody knows which of
    the two was read.
    """
    _listen()
    watch = _Watch()
    _watches.append(watch)
    try:
        yield
    finally:  # what fails has read files too
        _watches.remove(watch)
        changed = _note(factory, watch, frozenset(file.resolve() for file in sources))
    if changed is not None:
        raise CaptureError(
            f"{changed} changed while a model was made of it; leave it as it is, and start again"
        )


def _note(factory: str, watch: _Watch, sources: frozenset[Path]) -> Path | None:
    """Note what was read; return a file that somebody else changed meanwhile, if there is one."""
    changed, found = None, dict[Path, str]()
    for name, said in watch.opened.items():
        path = _source(Path(name))
        if path.resolve() in sources or not _counts(path):
            continue
        with suppress(OSError):  # it is gone: the block's own, for a while
            found[path] = file_digest(path)
            if path == Path(name) and found[path] != said and name not in watch.written:
                changed = path
    with _lock:
        mine = _read.setdefault(factory, _Factory())
        mine.sources |= sources
        mine.latest = found
        _add(mine.files, found)
    return changed


def _source(path: Path) -> Path:
    """Return the source of a compiled module, any other file as it is."""
    if path.suffix == ".pyc":
        with suppress(ValueError):
            return Path(source_from_cache(str(path)))
    return path


def _counts(path: Path) -> bool:
    place = str(path)
    aside = (*_OF_SYSTEM, *_kept_by_packages())
    here = Path.cwd()
    is_below = path.is_relative_to(here) and here != Path(here.anchor)
    is_mine = is_below or place.startswith(_FOR_DATA)
    return (is_mine or not place.startswith(aside)) and path.is_file() and is_own(path)


@cache
def _kept_by_packages() -> tuple[str, ...]:
    """Return how paths begin of what packages keep for themselves."""
    folders = [Path(sys.prefix) / name for name in _OF_PYTHON]
    with suppress(RuntimeError):  # nobody's home
        home = Path.home()
        folders += [home / ".cache", home / ".config", home / ".triton"]
    if named := os.environ.get("XDG_CACHE_HOME"):
        folders.append(Path(named))
    inductor = Path(tempfile.gettempdir()) / "torchinductor_"
    return (*(f"{folder}{os.sep}" for folder in folders), str(inductor))


@cache
def _listen() -> None:
    """Hear of each file that is opened; a hook cannot be taken away again."""
    sys.addaudithook(_heard)


def _heard(event: str, args: tuple[Any, ...]) -> None:
    if not _watches or event not in ("open", "os.rename", "os.link"):
        return
    # Whatever goes wrong here would go wrong in the code that opens the file.
    with suppress(Exception):
        if event == "open":
            _opened(*args)
            return
        for watch in _watches:  # it takes the place of another
            watch.written.add(_called(args[1]))


def _opened(place: object, _mode: object, flags: int) -> None:
    if not isinstance(place, str | bytes | os.PathLike):
        return  # it was opened before
    name = _called(place)
    if any(f"{os.sep}{folder}{os.sep}" in name for folder in INSTALLED_IN):
        return  # thousands, while torch is imported
    writes = bool(flags & _WRITING)
    for watch in tuple(_watches):
        if watch.is_read_by_us:
            continue
        if writes:
            watch.written.add(name)
        reads = flags & _WRITING != os.O_WRONLY
        if reads and name not in watch.opened and not (name.endswith(_CODE) and _for_its_lines()):
            watch.is_read_by_us = True
            try:
                # One that is yet to be made says nothing so far.
                watch.opened[name] = ""
                watch.opened[name] = file_digest(Path(name))
            finally:
                watch.is_read_by_us = False


def _called(place: str | bytes | os.PathLike[str]) -> str:
    """Return the whole path as it is called: a link may come to lead elsewhere."""
    return os.path.abspath(os.fsdecode(place))  # noqa: PTH100 - pathlib follows links, or keeps ..


def _for_its_lines() -> bool:
    """Return whether source is read for a traceback: not to be run."""
    frame = sys._getframe(3)
    for _ in range(3):
        if frame.f_globals.get("__name__") == "linecache":
            return True
        if frame.f_back is None:
            break
        frame = frame.f_back
    return False
