"""The user's own source files that a module imports, found by reading them. Nothing here runs."""

import ast
import hashlib
import sys
import sysconfig
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib.machinery import EXTENSION_SUFFIXES, SOURCE_SUFFIXES
from importlib.util import resolve_name
from pathlib import Path

__all__ = ["is_own", "own_imports", "source_digest"]

_FXPART = Path(__file__).resolve().parent.parent
_INSTALLED_IN = ("site-packages", "dist-packages")
_SUFFIXES = (*SOURCE_SUFFIXES, *EXTENSION_SUFFIXES)
_installed: set[str] = set()
"""Names known to be of installed packages, which stay so while a process lives."""


@dataclass(frozen=True, slots=True)
class _Source:
    digest: str
    names: tuple[str, ...]
    """Modules that it imports, and names that may be modules."""


@dataclass(frozen=True, slots=True)
class _Module:
    file: Path | None
    """None of a package without an ``__init__.py``."""
    folders: tuple[Path, ...]
    """Where its submodules lie, none unless it is a package."""


def own_imports(module: str, path: Path) -> dict[str, str]:
    """Return the SHA-256, by name, of each of the user's own modules that `module` at `path` runs.

    That is what it imports and what these import in turn, the packages that they lie in too, in
    the order of their names; `module` itself is left out. Installed packages, the standard library
    and fxpart have versions and digests of their own. A name that is put together while the
    program runs is not seen, nor is a file that it reads.
    """
    located: dict[str, _Module | None] = {}
    found: dict[str, str] = {}
    seen = {module}
    waiting = [*_around(module), *_source(path, module).names]
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
                found[name] = source.digest
                waiting += source.names
    return dict(sorted(found.items()))


def source_digest(path: Path) -> str:
    """Return the SHA-256 of a file, in hex; it is read again only after a change."""
    return _source(path, "").digest


@cache
def is_own(path: Path) -> bool:
    """Return whether nobody installed the file: not the standard library's, not fxpart's."""
    whole = path.resolve()
    if any(part in _INSTALLED_IN for part in whole.parts):
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
    is_now = path.stat()
    stamp = (is_now.st_mtime_ns, is_now.st_ctime_ns, is_now.st_size, is_now.st_ino)
    return _read(path, module, stamp)


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
        ) if not name.startswith("."):
            return [name]
    return []


def _around(module: str) -> list[str]:
    """Return the packages that a module lies in, the innermost first."""
    parts = module.split(".")
    return [".".join(parts[:count]) for count in range(len(parts) - 1, 0, -1)]
