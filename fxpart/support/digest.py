"""Digests that identify configurations, models, files and source code."""

import ast
import hashlib
import json
import os
import warnings
from collections.abc import Mapping
from contextlib import suppress
from functools import cache, lru_cache
from pathlib import Path

from fxpart.errors import CacheError
from fxpart.support.regular_file import regular_status
from fxpart.support.whole_file import write_whole

__all__ = [
    "LARGE_BYTES",
    "code_digest",
    "file_digest",
    "file_stamp",
    "parsed_source",
    "source_digest",
    "stable_digest",
]

LARGE_BYTES = 64 * 2**20
"""Files from this size on, most likely weights, are identified by size and time, as reading them is
slow."""


def stable_digest(parts: Mapping[str, object]) -> str:
    """Return the SHA-256 of `parts` as JSON with sorted keys, as 64 hex digits.

    Objects without a JSON type count as their `str`. Keys are converted to text, since YAML allows
    numbers and mixed keys cannot be sorted.
    """
    text = json.dumps(_text_keys(parts), sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def _text_keys(item: object) -> object:
    if isinstance(item, Mapping):
        return {str(key): _text_keys(value) for key, value in item.items()}
    return [_text_keys(value) for value in item] if isinstance(item, list | tuple) else item


def file_stamp(path: Path) -> tuple[int, ...]:
    """Return a stamp that changes whenever the file is written to.

    Raises:
        OSError: also if it is not a regular file.

    """
    status = regular_status(path)
    return (status.st_mtime_ns, status.st_ctime_ns, status.st_size, status.st_ino)


def file_digest(path: Path) -> str:
    """Return the SHA-256 of a file's content, in hex, cached until the file changes.

    For files of `LARGE_BYTES` or more it is the hash of the size and modification time.

    Raises:
        OSError: if the file cannot be read or is not a regular file.

    """
    return _file_digest(path, file_stamp(path))


@lru_cache(maxsize=1024)
def _file_digest(path: Path, stamp: tuple[int, ...]) -> str:
    mtime_ns, _, size_bytes, _ = stamp
    if size_bytes >= LARGE_BYTES:
        return hashlib.sha256(f"{size_bytes} bytes, {mtime_ns} ns".encode()).hexdigest()
    return hashlib.sha256(path.read_bytes()).hexdigest()


# Digests of source code by syntax tree. Parsing the library takes about 0.3 s and reading it 4 ms,
# so digests of folders are cached on disk under the digest of their bytes.


def parsed_source(content: bytes) -> ast.Module | None:
    """Return the syntax tree of Python source, or None if it does not parse."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # compiler warnings, such as invalid escapes
        try:
            return ast.parse(content)
        except (SyntaxError, ValueError, RecursionError):
            return None


def source_digest(content: bytes, tree: ast.Module | None) -> str:
    """Return the SHA-256, in hex, of Python source without comments, docstrings and formatting.

    `tree` is the `parsed_source` of `content`; if it is None, the bytes are hashed. Any string that
    is a statement of its own counts as a docstring.
    """
    if tree is not None:
        with suppress(RecursionError):
            content = _tree_text(tree).encode()
    return hashlib.sha256(content).hexdigest()


def _tree_text(item: object) -> str:
    """Return a syntax tree as text, without empty fields, which later Pythons may add."""
    if isinstance(item, ast.AST):
        fields = [(name, getattr(item, name, None)) for name in item._fields]
        texts = [f"{name}={_tree_text(value)}" for name, value in fields if value not in (None, [])]
        return f"{type(item).__name__}({','.join(texts)})"
    if isinstance(item, list):
        return f"[{','.join(_tree_text(value) for value in item if not _is_docstring(value))}]"
    return repr(item)


def _is_docstring(item: object) -> bool:
    return (
        isinstance(item, ast.Expr)
        and isinstance(item.value, ast.Constant)
        and isinstance(item.value.value, str)
    )


@cache
def code_digest(place: Path) -> str:
    """Return the `source_digest` of a file, or of all modules in a folder with their names.

    It is computed once per process, since imported code does not change with its file.
    """
    files = sorted(place.rglob("*.py")) if place.is_dir() else [place]
    contents = {file.relative_to(place).as_posix(): file.read_bytes() for file in files}
    digests = {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()}
    cache_file = (
        _cache_dir() / f"code-{stable_digest({**digests, 'digest.py': _own_digest()})[:32]}"
    )
    with suppress(OSError, UnicodeDecodeError):
        cached_digest = cache_file.read_text(encoding="ascii")
        if len(cached_digest) == len(_own_digest()):  # it may be empty after a power cut
            return cached_digest
    digest = stable_digest(
        {name: source_digest(text, parsed_source(text)) for name, text in contents.items()}
    )
    with suppress(CacheError):  # it is recomputed next time
        write_whole(cache_file, digest, str(cache_file), "make the folder writable")
    return digest


@cache
def _own_digest() -> str:
    """Return the digest of this file, as digests of other versions of it are not comparable."""
    return file_digest(Path(__file__))


def _cache_dir() -> Path:
    """Return the folder that by default also caches captured graphs."""
    home = os.environ.get("XDG_CACHE_HOME") or f"{os.environ.get('HOME', '.')}/.cache"
    return Path(home) / "fxpart"
