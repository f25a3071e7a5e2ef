"""Compile inner loops with numba, cached on disk after the first use.

Numba considers cached code valid as long as the file of a loop is unchanged, although loops inlined
from other files may have changed. So the cache key here covers every file of the package that the
loop's file imports, directly or indirectly.
"""

import hashlib
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast

import numba

from fxpart.support.file_lock import file_lock

if TYPE_CHECKING:
    from numba.core.caching import IndexDataCacheFile

__all__ = ["compiled", "inlined", "is_kept"]

_F = TypeVar("_F", bound=Callable[..., Any])

_PACKAGE = Path(__file__).resolve().parent.parent
_LOCK = "loops.lock"
_IMPORTED = re.compile(rf"^[ \t]*from ({_PACKAGE.name}\b[\w.]*) import", re.MULTILINE)


@cache
def _source(path: Path) -> tuple[bytes, tuple[Path, ...]]:
    """Return the content of a file, and the files of the package that it imports anywhere."""
    text = path.read_text(encoding="utf-8")
    bases = [_PACKAGE.parent / name.replace(".", "/") for name in _IMPORTED.findall(text)]
    files = [base / "__init__.py" if base.is_dir() else base.with_suffix(".py") for base in bases]
    return text.encode(), tuple(files)


@cache
def _loops_digest(path: Path) -> str:
    """Return a hash of `path` and all files that it imports, directly or indirectly."""
    visited, queue = {path}, [path]
    while queue:
        new_files = [file for file in _source(queue.pop())[1] if file not in visited]
        visited.update(new_files)
        queue.extend(new_files)
    digest = hashlib.sha256()
    for file in sorted(visited):
        digest.update(_source(file)[0])
    return digest.hexdigest()


def compiled(function: _F) -> _F:
    """Return `function` compiled to machine code; the code is cached beside the source."""
    return _njit(function, inline="never")


def inlined(function: _F) -> _F:
    """Return `function` marked for inlining into its compiled callers.

    For functions with a single caller or of few lines. Compiling it separately would take about
    twice as long, since numba passes every array of a table individually and compiles callees again
    for each caller.
    """
    return _njit(function, inline="always")


def _njit(function: _F, inline: Literal["never", "always"]) -> _F:
    # The loops are never called from C; numba's type stubs lack that option.
    options: dict[str, Any] = {"cache": True, "nogil": True, "no_cfunc_wrapper": True}
    dispatcher = numba.njit(inline=inline, **options)(function)
    # Numba has no public way to extend the cache key; without this attribute its own rule per file
    # applies. The version is compared before the rest of the index is unpickled, which refers to
    # classes by module and would fail for moved ones.
    cache_file = getattr(getattr(dispatcher, "_cache", None), "_cache_file", None)
    if cache_file is not None and hasattr(cache_file, "_version"):
        digest = _loops_digest(Path(function.__code__.co_filename).resolve())
        cache_file._version = (cache_file._version, digest)
        cache_file.save = _saving_alone(cache_file)
    return cast("_F", dispatcher)


def _saving_alone(cache_file: "IndexDataCacheFile") -> Callable[[object, object], None]:
    """Return numba's function that saves machine code, made safe for processes that do so at once.

    Numba reads the index, adds a number, writes the index, and then the code under that number. Two
    processes may take the same number for different types; and one that ends in between leaves the
    number of code that an earlier version of the source has left, which would be run.
    """
    folder, save = Path(cache_file._cache_path), cache_file.save
    codes = cache_file._data_name_pattern.replace("{number:d}", "*")

    def save_alone(key: object, code: object) -> None:
        with file_lock(folder / _LOCK):
            current = set(cache_file._load_index().values())
            for path in folder.glob(codes):
                if path.name not in current:
                    path.unlink(missing_ok=True)
            save(key, code)

    return save_alone


def is_kept(function: Callable[..., Any]) -> bool:
    """Return whether machine code of a `compiled` function is on disk, for any version of it.

    True if numba does not reveal its cache folder.
    """
    folder = getattr(getattr(function, "_cache", None), "cache_path", None)
    stem = Path(function.__code__.co_filename).stem
    return folder is None or any(Path(folder).glob(f"{stem}.{function.__name__}-*.nbi"))
