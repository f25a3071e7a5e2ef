"""Find a model factory, ``package.module:function``, and compute the digest of its sources."""

import importlib
import inspect
import os
import pkgutil
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import cast

from fxpart.capture.models.user_code import (
    as_imported,
    files_at_import,
    imported_modules,
    is_user_file,
    module_digest,
    source_file_digest,
    user_errors,
    user_line,
)
from fxpart.errors import CaptureError, FxpartError, SpecError, nearest_names, one_line
from fxpart.support.digest import stable_digest

__all__ = ["factory_as_imported", "factory_digest", "imported_function", "split_factory"]


def split_factory(factory: str, setting: str = "factory") -> tuple[str, str]:
    """Return the module and the function named by ``package.module:function``.

    Messages refer to it by the name `setting`.

    Raises:
        SpecError: if it has any other form.

    """
    module, colon, function = factory.partition(":")
    if not colon or not all(part.isidentifier() for part in [*module.split("."), function]):
        raise SpecError(
            f"{setting}={factory} is not of the form package.module:function,"
            " such as fxpart.capture.models.dlrm:dlrm"
        )
    return module, function


def imported_function(factory: str, setting: str = "factory") -> Callable[..., object]:
    """Import the module, from the working directory too, and return the function.

    Call it in the block of `factory_as_imported`, so that later edits are noticed.

    Raises:
        SpecError: if the module or the function does not exist.
        CaptureError: if the module fails.

    """
    module_name, function_name = split_factory(factory, setting)

    with user_errors(partial(_import_failure, CaptureError, factory, module_name, setting)):
        module = importlib.import_module(module_name)
    function = getattr(module, function_name, None)
    if function is not None and not callable(function):
        raise SpecError(
            f"{setting}={factory}: {function_name} of {module_name} is not a function but a value "
            f"of type {type(function).__name__}; name a function"
        )
    if function is None:
        functions = {
            name: value
            for name, value in vars(module).items()
            if inspect.isfunction(value) and value.__module__ == module_name
        }
        near = nearest_names(function_name, functions) if functions else "it has no functions"
        raise SpecError(f"{setting}={factory}: {module_name} has no {function_name}; {near}")
    return cast("Callable[..., object]", function)


def _import_failure(
    kind: type[FxpartError], factory: str, module: str, setting: str, error: BaseException
) -> FxpartError:
    """Return the error for a factory whose module, or a package around it, cannot be imported.

    It has the type `kind` if the module exists, but fails or imports one that does not exist.
    """
    if isinstance(error, ModuleNotFoundError):
        missing = error.name or module
        if missing == module or module.startswith(f"{missing}."):
            return _no_such_module(factory, missing, setting)
    return kind(f"{setting}={factory}: importing it fails{user_line(error)}: {one_line(error)}")


def _no_such_module(factory: str, missing: str, setting: str) -> SpecError:
    """Return the error for a factory whose module, or a package around it, does not exist."""
    beside = [module.name for module in pkgutil.iter_modules(_folders_beside(missing))]
    near = f"{nearest_names(missing.rpartition('.')[2], beside)}; " if beside else ""
    return SpecError(
        f"{setting}={factory}: there is no module {missing}; {near}"
        "start from the folder that holds it, or install it"
    )


def _folders_beside(module: str) -> Iterable[str]:
    """Return the folders that should contain the last part of `module`."""
    parent = sys.modules.get(module.rpartition(".")[0])
    return getattr(parent, "__path__", None) or [os.curdir]


@contextmanager
def factory_as_imported(factory: str | None, depends_on: Sequence[str] = ()) -> Iterator[None]:
    """Allow imports of the factory from the working directory, and record its sources then.

    Like `fxpart.capture.models.user_code.as_imported`; without a factory it does nothing.
    """
    if factory is None:
        yield
        return
    _see_working_directory()
    module, _ = split_factory(factory)
    with as_imported(module, _digests(depends_on)):
        yield


def _see_working_directory() -> None:
    """Add the working directory to the import path, as ``python -m`` does."""
    folder = str(Path.cwd())
    # An empty entry also stands for the working directory.
    if folder not in sys.path and "" not in sys.path:
        sys.path.insert(0, folder)
    importlib.invalidate_caches()


def factory_digest(factory: str, depends_on: Sequence[str] = (), setting: str = "factory") -> str:
    """Return the SHA-256, in hex, of the factory's code and files.

    It covers its module, the user's own modules that it imports, and the content of the files
    `depends_on`; comments and docstrings do not count. The packages that contain the module are
    imported, the module itself is not. Modules imported under `factory_as_imported` count as the
    code in memory.

    Raises:
        SpecError: if the module or its file does not exist, a package cannot be imported, or one of
            the files cannot be read.

    """
    files = _digests(depends_on)
    module, path = _factory_file(factory, depends_on, setting)
    imports = imported_modules(module, path) if is_user_file(path) else {}
    # A module may have kept the content of files that it read when it was imported.
    earlier = [files_at_import(name) for name in (module, *imports)]
    versions = [
        {
            current,
            *(digests_by_file[file] for digests_by_file in earlier if file in digests_by_file),
        }
        for file, current in files.items()
    ]
    return stable_digest(
        {
            "factory": module_digest(module, path),
            "imports": imports,
            "files": [sorted(digests) for digests in versions],
        }
    )


def _digests(depends_on: Sequence[str]) -> dict[Path, str]:
    """Return the digest of each file, by its absolute path. Raises `SpecError`."""
    digests = {}
    for name in depends_on:
        path = Path(name).absolute()
        try:
            digests[path] = source_file_digest(path)
        except OSError as error:
            raise SpecError(
                f"model.depends_on: cannot read {name} ({error.strerror or error}); give paths "
                "relative to the folder that the command is started in"
            ) from error
    return digests


def _factory_file(factory: str, depends_on: Sequence[str], setting: str) -> tuple[str, Path]:
    """Return the factory's module and its file. Raises the errors of `factory_digest`."""
    module, _ = split_factory(factory, setting)
    _see_working_directory()
    around = module.rpartition(".")[0]

    # Finding a module imports the packages that contain it.
    is_new = around and around not in sys.modules
    with (
        user_errors(partial(_import_failure, SpecError, factory, module, setting)),
        factory_as_imported(factory, depends_on) if is_new else nullcontext(),
    ):
        spec = find_spec(module)
    if spec is None:
        raise _no_such_module(factory, module, setting)
    if not spec.has_location or spec.origin is None:
        raise SpecError(
            f"{setting}={factory}: module {module} has no source file; name one that has"
        )
    return module, Path(spec.origin)
