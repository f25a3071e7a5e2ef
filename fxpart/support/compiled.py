"""The one place that knows how inner loops are compiled: numba, cached on disk after the first use.

Numba takes cached code for fresh while the file that a loop stands in is unchanged, although the
loops that it calls, inlined in that code, may have changed in another file. So here the freshness
of a loop covers every file of the package that its own file imports, at any remove.
"""

import hashlib
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

import numba

__all__ = ["compiled", "inlined", "is_kept"]

_F = TypeVar("_F", bound=Callable[..., Any])

_PACKAGE = Path(__file__).resolve().parent.parent
_IMPORTED = re.compile(rf"^[ \t]*from ({_PACKAGE.name}\b[\w.]*) import", re.MULTILINE)


@cache
def _source(path: Path) -> tuple[bytes, tuple[Path, ...]]:
    """Return what a file says, and which files of the package it imports, wherever in it."""
    text = path.read_text(encoding="utf-8")
    bases = [_PACKAGE.parent / name.replace(".", "/") for name in _IMPORTED.findall(text)]
    files = [base / "__init__.py" if base.is_dir() else base.with_suffix(".py") for base in bases]
    return text.encode(), tuple(files)


@cache
def _loops_digest(path: Path) -> str:
    """Return a hash of `path` and of every file that it imports, directly or not."""
    seen, queue = {path}, [path]
    while queue:
        fresh = [file for file in _source(queue.pop())[1] if file not in seen]
        seen.update(fresh)
        queue.extend(fresh)
    digest = hashlib.sha256()
    for file in sorted(seen):
        digest.update(_source(file)[0])
    return digest.hexdigest()


def compiled(function: _F) -> _F:
    """Return `function` compiled to machine code; the code is cached beside the source."""
    return _njit(function, inline="never")


def inlined(function: _F) -> _F:
    """Return `function` made a part of each compiled loop that calls it: of one, or in few lines.

    Compiled on its own it would take about twice as long: numba passes every array of a table one
    by one, and makes machine code of what is called again for each caller.
    """
    return _njit(function, inline="always")


def _njit(function: _F, inline: Literal["never", "always"]) -> _F:
    # Nobody calls the loops from C; numba's types leave that option out.
    options: dict[str, Any] = {"cache": True, "nogil": True, "no_cfunc_wrapper": True}
    dispatcher = numba.njit(inline=inline, **options)(function)
    # Numba has no public way to add to what decides freshness; without this attribute its own
    # rule, file by file, remains. The version is compared before the rest is read, which names
    # classes by module: one that has moved since must not be looked for.
    cache_file = getattr(getattr(dispatcher, "_cache", None), "_cache_file", None)
    if cache_file is not None and hasattr(cache_file, "_version"):
        digest = _loops_digest(Path(function.__code__.co_filename).resolve())
        cache_file._version = (cache_file._version, digest)
    return cast("_F", dispatcher)


def is_kept(function: Callable[..., Any]) -> bool:
    """Return whether machine code of a `compiled` function is on disk, of whatever source.

    True where numba does not say where it would be.
    """
    folder = getattr(getattr(function, "_cache", None), "cache_path", None)
    stem = Path(function.__code__.co_filename).stem
    return folder is None or any(Path(folder).glob(f"{stem}.{function.__name__}-*.nbi"))
