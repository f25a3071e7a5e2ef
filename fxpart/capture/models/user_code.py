"""The user's own code: which files belong to it, which line failed, and what a module imports.

Imports are found in the source, with `ast` and Python's finders, without running it. For a module
imported under `as_imported` the source at that time counts, even if its file has changed: that is
the code in memory.
"""

import ast
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib.machinery import SOURCE_SUFFIXES, ModuleSpec, PathFinder
from importlib.util import find_spec, resolve_name
from pathlib import Path
from traceback import walk_tb

from fxpart.errors import CaptureError, FxpartError
from fxpart.support.digest import file_digest, file_stamp, parsed_source, source_digest

__all__ = [
    "LOSS_NOTE",
    "as_imported",
    "files_at_import",
    "imported_modules",
    "is_user_file",
    "module_digest",
    "source_file_digest",
    "user_errors",
    "user_line",
    "where_raised",
]

LOSS_NOTE = "raised in model.loss="
"""Start of a note on an error of the user's loss function, which is called by the model's forward.
A note rather than a new exception, because torch inspects the original."""

_FXPART = Path(__file__).resolve().parents[2]
_INSTALLED_IN = ("site-packages", "dist-packages")


@cache
def is_user_file(path: Path) -> bool:
    """Return whether a file is outside installed packages, the standard library and fxpart."""
    whole = path.resolve()
    if any(part in _INSTALLED_IN for part in whole.parts):
        return False
    folders = [sysconfig.get_path(key) for key in ("stdlib", "platstdlib", "purelib", "platlib")]
    return not any(whole.is_relative_to(Path(f).resolve()) for f in folders) and (
        not whole.is_relative_to(_FXPART)
    )


@contextmanager
def user_errors(explain: Callable[[BaseException], FxpartError]) -> Iterator[None]:
    """Convert errors of the user's code in the block by `explain`.

    This includes a SystemExit, which would end the command with its own code, and any other
    BaseException except an interrupt. Errors of fxpart are unchanged.
    """
    try:
        yield
    except (KeyboardInterrupt, FxpartError):
        raise
    except BaseException as error:
        raise explain(error) from error


def user_line(error: BaseException) -> str:
    """Return `` (mine.py:12)``, the innermost line of the user's code that led to `error`.

    Empty if there is none. If another error caused it, the lines of the cause count.
    """
    text = ""
    link: BaseException | None = error
    while link is not None:
        for frame, line in walk_tb(link.__traceback__):
            path = Path(frame.f_code.co_filename)
            if path.is_file() and is_user_file(path):
                folder = Path.cwd()
                shown = path.relative_to(folder) if path.is_relative_to(folder) else path
                text = f" ({shown}:{line})"
        link = link.__cause__
    return text


def where_raised(error: BaseException, model: str) -> str:
    """Return ``model.loss=NAME`` if the user's loss function raised `error`, else `model`."""
    link: BaseException | None = error
    while link is not None:
        for note in getattr(link, "__notes__", ()):
            if note.startswith(LOSS_NOTE):
                return str(note).removeprefix("raised in ")
        link = link.__cause__ or link.__context__
    return model


@dataclass(frozen=True, slots=True)
class _Source:
    digest: str
    imports: tuple[str, ...]
    """Imported modules, and imported names that may be modules."""


@dataclass(frozen=True, slots=True)
class _Imported:
    """A module in memory."""

    spec: ModuleSpec
    """Changes with every import of the module."""
    source: _Source | None
    """Its source when it was imported; None if the file changed meanwhile."""
    files: Mapping[Path, str]
    """Digests of files that it may have read during import, by path."""


_imported: dict[str, _Imported] = {}
"""The modules imported under `as_imported`, by name."""
_closures: dict[tuple[str, Path], dict[str, tuple[Path, _Source]]] = {}
"""Sources of a module and all its imports, by module and file, valid until one of them changes. So
imports that become possible only after it has run, by a path it adds itself, do not count."""


def imported_modules(module: str, path: Path) -> dict[str, str]:
    """Return the digest of each of the user's modules that `module` at `path` imports, by name.

    Includes indirect imports and the packages that contain them, sorted by name, without `module`.
    Installed packages, the standard library and fxpart have versions and digests of their own.
    Names computed at run time are not found.
    """
    closure = _closure(module, path)
    return {name: source.digest for name, (_, source) in closure.items() if name != module}


def module_digest(module: str, path: Path) -> str:
    """Return the digest of `module`'s file, without comments and docstrings.

    Raises `OSError`, and `CaptureError` if the file changed while it was imported.
    """
    return _source(path, module).digest


def source_file_digest(path: Path) -> str:
    """Return the digest of a file, for Python source without comments. Raises `OSError`."""
    return _read(path, "").digest


@contextmanager
def as_imported(module: str, files: Iterable[Path] = ()) -> Iterator[None]:
    """Record the sources of `module` and all its imports, if the block imports them.

    Also records the digests of `files`, which it may read during import. A module imported earlier
    by other code is assumed to match the current content of its file.

    Raises `CaptureError`, now and on later requests for the module, if a source changes meanwhile,
    since it is unknown which version was read.
    """
    path = _user_file(module, {})
    before = {} if path is None else _closure(module, path)
    digests = {file: source_file_digest(file) for file in files}
    try:
        yield
    finally:  # a module stays in memory even if its function fails
        for name, (file, source) in before.items():
            spec = getattr(sys.modules.get(name), "__spec__", None)
            if spec is not None and _in_memory(name) is None:
                is_same = _digest_now(file, name) == source.digest
                _imported[name] = _Imported(spec, source if is_same else None, digests)
    for name, (file, _) in before.items():
        _source(file, name)


def files_at_import(module: str) -> Mapping[Path, str]:
    """Return the digests of the files that `module` may have read during import."""
    known = _in_memory(module)
    return known.files if known else {}


def _digest_now(file: Path, module: str) -> str | None:
    try:
        return _read(file, module).digest
    except OSError:  # the file is gone
        return None


def _in_memory(module: str) -> _Imported | None:
    known = _imported.get(module)
    spec = getattr(sys.modules.get(module), "__spec__", None)
    return known if known is not None and spec is known.spec else None


def _closure(module: str, path: Path) -> dict[str, tuple[Path, _Source]]:
    known = _closures.get((module, path))
    if known is None or not _is_current(known):
        known = _closures[module, path] = _read_closure(module, path)
    return known


def _is_current(sources: Mapping[str, tuple[Path, _Source]]) -> bool:
    try:
        return all(_source(file, name) == source for name, (file, source) in sources.items())
    except OSError:  # a file is gone
        return False


def _read_closure(module: str, path: Path) -> dict[str, tuple[Path, _Source]]:
    located: dict[str, ModuleSpec | None] = {}
    sources = {module: (path, _source(path, module))}
    seen = {module}
    waiting = [*_packages_around(module), *sources[module][1].imports]
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        file = _user_file(name, located)
        if file is not None:
            with suppress(OSError):  # the file is gone again
                sources[name] = (file, _source(file, name))
                waiting += sources[name][1].imports
    return dict(sorted(sources.items()))


def _user_file(name: str, located: dict[str, ModuleSpec | None]) -> Path | None:
    """Return the file of a module of the user's, or None if it is not one or has no file."""
    spec = _locate(name, located)
    file = Path(spec.origin) if spec and spec.has_location and spec.origin else None
    return file if file is not None and is_user_file(file) else None


def _locate(name: str, located: dict[str, ModuleSpec | None]) -> ModuleSpec | None:
    """Return the spec of a module of the user's, or None if it is installed or missing."""
    if name in located:
        return located[name]
    package = name.rpartition(".")[0]
    spec = None
    with suppress(ImportError, ValueError, AttributeError, OSError):
        if not package:
            spec = None if name in sys.stdlib_module_names else find_spec(name)
        elif around := _locate(package, located):
            # Without `find_spec`, which would import the package.
            spec = PathFinder.find_spec(name, list(around.submodule_search_locations or ()))
    if spec is not None:
        file = [spec.origin] if spec.has_location and spec.origin else []
        folders = spec.submodule_search_locations or ()
        if not any(is_user_file(Path(place)) for place in (*file, *folders)):
            spec = None
    located[name] = spec
    return spec


def _source(path: Path, module: str) -> _Source:
    known = _in_memory(module)
    if known is None:
        return _read(path, module)
    if known.source is None:
        raise CaptureError(
            f"{path} changed while it was imported; leave it as it is, and start again"
        )
    return known.source


def _read(path: Path, module: str) -> _Source:
    return _read_once(path, module, file_stamp(path))


@lru_cache(maxsize=1024)
def _read_once(path: Path, module: str, stamp: tuple[int, ...]) -> _Source:
    """Return the content of a file; `stamp` changes whenever the file is written."""
    if path.suffix not in SOURCE_SUFFIXES:
        return _Source(file_digest(path), ())
    content = path.read_bytes()
    tree = parsed_source(content)
    package = module if path.stem == "__init__" else module.rpartition(".")[0]
    # A file that is not Python is refused with its own message on import.
    names = _imports_of(tree, package) if tree is not None else ()
    return _Source(source_digest(content, tree), tuple(dict.fromkeys(names)))


def _imports_of(tree: ast.AST, package: str) -> Iterator[str]:
    """Yield the names imported anywhere in a module of `package`, and the packages around them."""
    for node in ast.walk(tree):
        for name in _imports_by(node, package):
            yield name
            yield from _packages_around(name)


def _imports_by(node: ast.AST, package: str) -> Iterable[str]:
    match node:
        case ast.Import(names=names):
            return [alias.name for alias in names]
        case ast.ImportFrom(module=module, names=names, level=level):
            try:
                base = resolve_name("." * level + (module or ""), package)
            except ImportError:  # beyond the outermost package
                return []
            # Each may be a submodule or an attribute of the package.
            return [base, *(f"{base}.{alias.name}" for alias in names if alias.name != "*")]
        case ast.Call(
            func=ast.Name(id="import_module" | "__import__") | ast.Attribute(attr="import_module"),
            args=[ast.Constant(value=str(name)), *_],
        ):
            with suppress(ImportError):  # beyond the outermost package
                return [resolve_name(name, package)]
    return []


def _packages_around(module: str) -> list[str]:
    """Return the packages that contain a module, the innermost first."""
    parts = module.split(".")
    return [".".join(parts[:count]) for count in range(len(parts) - 1, 0, -1)]
