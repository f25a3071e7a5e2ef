"""Compile inner loops with numba, cached on disk after the first use.

Numba considers cached code valid as long as the file of a loop is unchanged, although a function
that it calls may have changed in another file; and invalid after every edit of its file, such as
that of a comment. Here cached code is valid as long as all that decides it is unchanged: the code
of the loop and of the compiled functions that it calls, directly or indirectly, with the constants
and the fields of the tables that they use.
"""

import hashlib
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dis import get_instructions
from functools import cache
from pathlib import Path
from types import CodeType, ModuleType
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast, get_args, get_type_hints

import numba
from numba.core.dispatcher import Dispatcher

from fxpart.support.file_lock import file_lock

if TYPE_CHECKING:
    from numba.core.caching import IndexDataCacheFile

__all__ = ["compiled", "inlined", "is_kept"]

_F = TypeVar("_F", bound=Callable[..., Any])

_LOCK = "loops.lock"
_INTERNALS = (
    "_version",
    "_source_stamp",
    "_cache_path",
    "_index_path",
    "_data_name_pattern",
    "_load_index",
    "load",
    "save",
)
"""What is used of numba's cache."""
_DIGITS = 12
_LINE = re.compile(r"-\d+\.(?=py\d)")
"""The line of a loop in the names of its files."""
_LIBRARIES = ("numpy", "math")
"""Modules that loops may use; `constraints.txt` and numba's own key have their versions."""


def _loops_digest(loop: Dispatcher) -> str:
    """Return a hash of all that decides the machine code of `loop`, but the types of arguments."""
    visited: dict[Any, str] = {}
    queue: list[Any] = [loop]
    while queue:
        part = queue.pop()
        if part not in visited:
            visited[part], used = _text_and_uses(part)
            queue.extend(used)
    return hashlib.sha256("\n".join(sorted(visited.values())).encode()).hexdigest()


@cache
def _text_and_uses(part: Any) -> tuple[str, list[Any]]:  # noqa: ANN401 - a loop or a table
    """Return a compiled function, or a class of tables, as text, and those that it uses."""
    uses = [table for hint in get_type_hints(_plain(part)).values() for table in _tables(hint)]
    name = f"{_plain(part).__module__}.{_plain(part).__qualname__}"
    if not isinstance(part, Dispatcher):
        return f"{name} {part._fields}", uses
    constants: dict[str, object] = {}
    for used_name, value in _used_globals(part.py_func):
        if isinstance(value, Dispatcher) or hasattr(value, "_fields"):
            uses.append(value)
        elif isinstance(value, int | float | str | tuple):
            constants[used_name] = value
        elif not isinstance(value, ModuleType) or value.__name__ not in _LIBRARIES:
            raise TypeError(
                f"the loop {name} uses {used_name}, which is neither a loop, a table nor a number"
            )
    code = part.py_func.__code__
    text = _code_text(code, part.py_func.__doc__)
    return f"{name} {sorted(part.targetoptions.items())} {sorted(constants.items())} {text}", uses


def _plain(part: Any) -> Any:  # noqa: ANN401 - a loop or a table
    return part.py_func if isinstance(part, Dispatcher) else part


def _tables(hint: object) -> Iterator[object]:
    """Yield the classes of tables in a type."""
    if hasattr(hint, "_fields"):
        yield hint
    for part in get_args(hint):
        yield from _tables(part)


def _used_globals(function: Any) -> Iterator[tuple[str, object]]:  # noqa: ANN401
    for name in dict.fromkeys(_global_names(function.__code__)):
        if name in function.__globals__:  # otherwise it is a builtin
            yield name, function.__globals__[name]


def _global_names(code: CodeType) -> Iterator[str]:
    for instruction in get_instructions(code):
        if instruction.opname == "LOAD_GLOBAL":
            yield instruction.argval
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _global_names(constant)


def _code_text(code: CodeType, docstring: str | None) -> str:
    """Return what a function does as text, without its place in a file and its docstring."""
    constants = [
        _code_text(constant, None) if isinstance(constant, CodeType) else repr(constant)
        for constant in code.co_consts
        if constant is not docstring
    ]
    names = (code.co_names, code.co_varnames, code.co_argcount)
    return f"{code.co_code.hex()} {code.co_exceptiontable.hex()} {names} {constants}"


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
    loop: Any = numba.njit(inline=inline, **options)(function)
    # Numba has no public way to define the cache key; without these attributes its own rule per
    # file applies.
    cache_file = getattr(getattr(loop, "_cache", None), "_cache_file", None)
    if cache_file is not None and all(hasattr(cache_file, name) for name in _INTERNALS):
        _find_by_code(loop, cache_file)
    return cast("_F", loop)


def _find_by_code(loop: Dispatcher, cache_file: "IndexDataCacheFile") -> None:
    """Replace numba's `load` and `save`, which find code by the file and line of a loop.

    Cached code may be damaged: numba would let the error end the program. Without its index, a loop
    is compiled and saved anew.

    To save, numba reads the index, writes it with one more number, and then the code under that
    number. Two processes would take the same number for different types. And a process killed
    between the two writes would leave an index that points to code of an earlier source.
    """
    load, save, version = cache_file.load, cache_file.save, cache_file._version
    folder, index = (
        Path(path) for path in (cache_file._cache_path, _LINE.sub("-", cache_file._index_path))
    )
    base, placeholder, end = _LINE.sub("-", cache_file._data_name_pattern).partition("{number")
    cache_file._index_path = str(index)

    @cache
    def use_digest() -> None:
        # At the first call: functions that the loop calls may be defined after it. The version is
        # compared before the rest of the index is unpickled, which refers to classes by module and
        # would fail for moved ones.
        digest = cache_file._source_stamp = _loops_digest(loop)
        cache_file._version = (version, digest)
        cache_file._data_name_pattern = f"{base}{digest[:_DIGITS]}.{placeholder}{end}"

    def load_undamaged(key: object) -> object:
        use_digest()
        try:
            return load(key)
        except Exception:  # what unpickling a file cut off by a crash or a full disk raises
            with suppress(OSError):
                index.unlink()
            return None

    def save_locked(key: object, code: object) -> None:
        use_digest()
        with ExitStack() as stack:
            with suppress(OSError):  # another user's lock: code of two types may get mixed up
                stack.enter_context(file_lock(folder / _LOCK))
            indexed_names = set(cache_file._load_index().values())
            for path in folder.glob(f"{base}*.nbc"):
                if path.name not in indexed_names:
                    with suppress(OSError):
                        path.unlink()
            save(key, code)

    cache_file.load, cache_file.save = load_undamaged, save_locked


def is_kept(function: Callable[..., Any]) -> bool:
    """Return whether machine code of a `compiled` function is on disk, for any version of it.

    True if numba does not reveal its cache folder.
    """
    folder = getattr(getattr(function, "_cache", None), "cache_path", None)
    stem = Path(function.__code__.co_filename).stem
    return folder is None or any(Path(folder).glob(f"{stem}.{function.__name__}-*.nbi"))
