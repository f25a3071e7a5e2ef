"""Compile inner loops with numba, cached on disk after the first use.

Numba considers cached code valid as long as the file of a loop is unchanged, although loops inlined
from other files may have changed. So the cache key here covers every file of the package that the
loop's file imports, directly or indirectly.
"""

import hashlib
import re
from collections.abc import Callable
from contextlib import ExitStack, suppress
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
_INTERNALS = (
    "_version",
    "_cache_path",
    "_index_path",
    "_data_name_pattern",
    "_load_index",
    "load",
    "save",
)
"""What is used of numba's cache."""
_DIGITS = 12
_IMPORTED = re.compile(rf"^[ \t]*from ({_PACKAGE.name}\b[\w.]*) import", re.MULTILINE)


@cache
def _source(path: Path) -> tuple[bytes, tuple[Path, ...]]:
    """Return the content of a file, and the files of the package that it imports anywhere."""
    text = path.read_text(encoding="utf-8")
    bases = [_PACKAGE.parent / name.replace(".", "/") for name in _IMPORTED.findall(text)]
    # As Python imports them: a folder may be what is left of a package that is a module now.
    packages = [base / "__init__.py" for base in bases]
    files = [
        p if p.exists() else b.with_suffix(".py") for b, p in zip(bases, packages, strict=True)
    ]
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
    # Numba has no public way to extend the cache key; without these attributes its own rule per
    # file applies. The version is compared before the rest of the index is unpickled, which refers
    # to classes by module and would fail for moved ones.
    cache_file = getattr(getattr(dispatcher, "_cache", None), "_cache_file", None)
    if cache_file is not None and all(hasattr(cache_file, name) for name in _INTERNALS):
        digest = _loops_digest(Path(function.__code__.co_filename).resolve())
        cache_file._version = (cache_file._version, digest)
        cache_file.load = _load_undamaged(cache_file)
        cache_file.save = _locked_save(cache_file, digest)
    return cast("_F", dispatcher)


def _load_undamaged(cache_file: "IndexDataCacheFile") -> Callable[[object], object]:
    """Return numba's `load`, which also returns None if the cached code is damaged.

    Numba would let the error end the program. Without its index, a loop is compiled and saved anew.
    """
    load, index = cache_file.load, Path(cache_file._index_path)

    def load_undamaged(key: object) -> object:
        try:
            return load(key)
        except Exception:  # what unpickling a file cut off by a crash or a full disk raises
            with suppress(OSError):
                index.unlink()
            return None

    return load_undamaged


def _locked_save(cache_file: "IndexDataCacheFile", digest: str) -> Callable[[object, object], None]:
    """Return numba's `save`, serialised across processes, with the `digest` in the names of files.

    Numba reads the index, writes it with one more number, and then the code under that number. Two
    processes would take the same number for different types. And a process killed between the two
    writes would leave an index that points to code of an earlier source.
    """
    folder, save = Path(cache_file._cache_path), cache_file.save
    base, placeholder, end = cache_file._data_name_pattern.partition("{number")
    cache_file._data_name_pattern = f"{base}{digest[:_DIGITS]}.{placeholder}{end}"

    def save_locked(key: object, code: object) -> None:
        with ExitStack() as stack:
            with suppress(OSError):  # another user's lock: code of two types may get mixed up
                stack.enter_context(file_lock(folder / _LOCK))
            indexed_names = set(cache_file._load_index().values())
            for path in folder.glob(f"{base}*.nbc"):
                if path.name not in indexed_names:
                    with suppress(OSError):
                        path.unlink()
            save(key, code)

    return save_locked


def is_kept(function: Callable[..., Any]) -> bool:
    """Return whether machine code of a `compiled` function is on disk, for any version of it.

    True if numba does not reveal its cache folder.
    """
    folder = getattr(getattr(function, "_cache", None), "cache_path", None)
    stem = Path(function.__code__.co_filename).stem
    return folder is None or any(Path(folder).glob(f"{stem}.{function.__name__}-*.nbi"))
