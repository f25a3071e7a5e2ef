"""The user's own source files that a module imports, found by reading them. Nothing here runs.

A module that `as_read` saw imported is what it was then, whatever its file says by now: that is the
code in memory.
"""

import ast
import hashlib
import sys
import sysconfig
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib.machinery import EXTENSION_SUFFIXES, SOURCE_SUFFIXES, ModuleSpec
from importlib.util import resolve_name
from pathlib import Path

from fxpart.errors import CaptureError
from fxpart.support.digest import file_stamp

__all__ = ["INSTALLED_IN", "as_read", "is_own", "own_files", "own_imports", "source_digest"]

_FXPART = Path(__file__).resolve().parents[2]
INSTALLED_IN = ("site-packages", "dist-packages")
"""Folders of what somebody installed."""
_SUFFIXES = (*SOURCE_SUFFIXES, *EXTENSION_SUFFIXES)
_installed: set[str] = set()
"""Names known to be of installed packages, which stay so while a process lives."""


@dataclass(frozen=True, slots=True)
class _Source:
    digest: str
    names: tuple[str, ...]
    """Modules that it imports, and names that may be modules."""


_in_memory: dict[str, tuple[ModuleSpec, _Source | Path]] = {}
"""By name, modules as they were imported: a file's path if nobody knows what it said then. Another
import of a module gives it another spec."""


_found: dict[tuple[str, Path], dict[str, tuple[Path, _Source]]] = {}
"""By module and file, its sources, while all of them say the same. What it can import only after it
has run, from a path or a file of its own making, then changes no identity."""


@dataclass(frozen=True, slots=True)
class _Module:
    file: Path | None
    """None of a package without an ``__init__.py``."""
    folders: tuple[Path, ...]
    """Where its submodules lie, none unless it is a package."""


def own_files(module: str) -> list[Path]:
    """Return the files of `module` and of what it imports, as `own_imports`; none if not found."""
    path = _own_file(module, {})
    return [] if path is None else [file for file, _ in _known(module, path).values()]


def own_imports(module: str, path: Path) -> dict[str, str]:
    """Return the SHA-256, by name, of each of the user's own modules that `module` at `path` runs.

    That is what it imports and what these import in turn, the packages that they lie in too, in
    the order of their names; `module` itself is left out. Installed packages, the standard library
    and fxpart have versions and digests of their own. A name that is put together while the
    program runs is not seen, nor is a file that it reads: see `fxpart.capture.models.files_read`.
    """
    known = _known(module, path)
    return {name: source.digest for name, (_, source) in known.items() if name != module}


def _known(module: str, path: Path) -> dict[str, tuple[Path, _Source]]:
    known = _found.get((module, path))
    if known is None or not _is_same(known):
        known = _found[module, path] = _sources(module, path)
    return known


def _is_same(sources: Mapping[str, tuple[Path, _Source]]) -> bool:
    try:
        return all(_source(file, name) == source for name, (file, source) in sources.items())
    except OSError:  # a file is gone
        return False


def _sources(module: str, path: Path) -> dict[str, tuple[Path, _Source]]:
    """Return the file, and what it says, of `module` and of all that it imports, by name."""
    located: dict[str, _Module | None] = {}
    found = {module: (path, _source(path, module))}
    seen = {module}
    waiting = [*_around(module), *found[module][1].names]
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        file = _own_file(name, located)
        # A file that is gone again is as good as none.
        with suppress(OSError):
            if file is not None:
                source = _source(file, name)
                found[name] = (file, source)
                waiting += source.names
    return dict(sorted(found.items()))


def source_digest(path: Path, module: str) -> str:
    """Return the SHA-256 of `module`'s file, in hex; it is read again only after a change."""
    return _source(path, module).digest


@contextmanager
def as_read(module: str) -> Iterator[None]:
    """Keep what `module` and its `own_imports` say, those of them that the block imports.

    One that was imported before, by somebody else, is taken to be what its file says now.

    Raises `CaptureError`, now and whenever the module is asked for, when a file changes meanwhile:
    nobody knows which of the two was read.
    """
    path = _own_file(module, {})
    before = {} if path is None else _sources(module, path)
    try:
        yield
    finally:  # a module whose function fails is in memory too
        for name, (file, source) in before.items():
            spec = getattr(sys.modules.get(name), "__spec__", None)
            if spec is not None and not _is_kept(name):
                _in_memory[name] = (spec, source if _is_still(file, name, source) else file)
    for name in before:
        _kept(name)


def _is_still(file: Path, module: str, source: _Source) -> bool:
    try:
        return _read_now(file, module).digest == source.digest
    except OSError:  # it is gone
        return False


def _is_kept(module: str) -> bool:
    spec, _ = _in_memory.get(module, (None, None))
    return spec is not None and getattr(sys.modules.get(module), "__spec__", None) is spec


def _kept(module: str) -> _Source | None:
    """Return what a module said when it was imported, None if that was not seen."""
    if not _is_kept(module):
        return None
    _, source = _in_memory[module]
    if isinstance(source, Path):
        raise CaptureError(
            f"{source} changed while it was imported; leave it as it is, and start again"
        )
    return source


@cache
def is_own(path: Path) -> bool:
    """Return whether nobody installed the file: not the standard library's, not fxpart's."""
    whole = path.resolve()
    if any(part in INSTALLED_IN for part in whole.parts):
        return False
    folders = [sysconfig.get_path(key) for key in ("stdlib", "platstdlib", "purelib", "platlib")]
    return not any(whole.is_relative_to(Path(f).resolve()) for f in folders) and (
        not whole.is_relative_to(_FXPART)
    )


def _own_file(name: str, located: dict[str, _Module | None]) -> Path | None:
    found = _locate(name, located)
    return found.file if found and found.file and is_own(found.file) else None


def _locate(name: str, located: dict[str, _Module | None]) -> _Module | None:
    """Return where a module lies, None where it does not exist or is installed."""
    if name not in located:
        package, _, last = name.rpartition(".")
        if package:
            around = _locate(package, located)
            located[name] = _inside(around.folders, last) if around else None
        else:
            located[name] = _top(last)
    return located[name]


def _top(name: str) -> _Module | None:
    """Return where a module in no package lies, as Python's own finders say."""
    if name in _installed or name in sys.stdlib_module_names:
        return None
    for finder in sys.meta_path:
        with suppress(ImportError, ValueError, KeyError, OSError):
            spec = finder.find_spec(name, None)
            if spec is None:
                continue
            file = Path(spec.origin) if spec.has_location and spec.origin else None
            folders = tuple(map(Path, spec.submodule_search_locations or ()))
            if any(is_own(place) for place in (file, *folders) if place):
                return _Module(file, folders)
            _installed.add(name)
            return None
    return None


def _inside(folders: Sequence[Path], name: str) -> _Module | None:
    """Return where a module in a package lies; the package's own code is not asked."""
    parts = []
    for folder in folders:
        package = folder / name
        if (package / "__init__.py").is_file():
            return _Module(package / "__init__.py", (package,))
        for suffix in _SUFFIXES:
            file = folder / f"{name}{suffix}"
            if file.is_file():
                return _Module(file, ())
        if package.is_dir():
            parts.append(package)
    return _Module(None, tuple(parts)) if parts else None


def _source(path: Path, module: str) -> _Source:
    return _kept(module) or _read_now(path, module)


def _read_now(path: Path, module: str) -> _Source:
    return _read(path, module, file_stamp(path))


@lru_cache(maxsize=1024)
def _read(path: Path, module: str, stamp: tuple[int, ...]) -> _Source:
    """Return what a file says. `stamp` changes whenever somebody writes to it."""
    content = path.read_bytes()
    names: tuple[str, ...] = ()
    if module and path.suffix in SOURCE_SUFFIXES:
        package = module if path.stem == "__init__" else module.rpartition(".")[0]
        # What is no Python is refused when it is imported, in words of its own.
        with suppress(SyntaxError, ValueError, RecursionError), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            names = tuple(dict.fromkeys(_imported(ast.parse(content), package)))
    return _Source(hashlib.sha256(content).hexdigest(), names)


def _imported(tree: ast.AST, package: str) -> Iterator[str]:
    """Yield what a module of `package` imports anywhere, and the packages around that."""
    for node in ast.walk(tree):
        for name in _named(node, package):
            yield name
            yield from _around(name)


def _named(node: ast.AST, package: str) -> Iterable[str]:
    match node:
        case ast.Import(names=names):
            return [alias.name for alias in names]
        case ast.ImportFrom(module=module, names=names, level=level):
            try:
                base = resolve_name("." * level + (module or ""), package)
            except ImportError:  # beyond the outermost package
                return []
            # Each may be a submodule or a name of the package's own.
            return [base, *(f"{base}.{alias.name}" for alias in names if alias.name != "*")]
        case ast.Call(
            func=ast.Name(id="import_module" | "__import__") | ast.Attribute(attr="import_module"),
            args=[ast.Constant(value=str(name)), *_],
        ):
            with suppress(ImportError):  # beyond the outermost package
                return [resolve_name(name, package)]
    return []


def _around(module: str) -> list[str]:
    """Return the packages that a module lies in, the innermost first."""
    parts = module.split(".")
    return [".".join(parts[:count]) for count in range(len(parts) - 1, 0, -1)]
