"""Where a model factory, ``package.module:function``, lies on disk. Nothing here runs it."""

import importlib
import importlib.util
import os
import pkgutil
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

from fxpart.capture.models.files_read import noted_files
from fxpart.capture.models.own_imports import as_read, is_own, own_files, own_imports, source_digest
from fxpart.capture.models.user_line import own_line
from fxpart.errors import SpecError, nearest_names, one_line
from fxpart.support.digest import stable_digest

__all__ = [
    "factory_as_read",
    "factory_digest",
    "factory_place",
    "loaded_sources",
    "no_such_module",
    "see_working_directory",
    "split_factory",
]


def split_factory(factory: str) -> tuple[str, str]:
    """Return the module and the function that ``package.module:function`` names.

    Raises:
        SpecError: for any other form.

    """
    module, colon, function = factory.partition(":")
    if not colon or not all(part.isidentifier() for part in [*module.split("."), function]):
        raise SpecError(
            f"factory={factory} is not of the form package.module:function,"
            " such as fxpart.capture.models.dlrm:dlrm"
        )
    return module, function


def see_working_directory() -> None:
    """Let modules in the working directory be imported, as ``python -m`` does."""
    here = str(Path.cwd())
    # An empty entry also stands for the working directory.
    if here not in sys.path and "" not in sys.path:
        sys.path.insert(0, here)
    importlib.invalidate_caches()


def _folders_beside(module: str) -> Iterable[str]:
    """Return the folders in which the last part of `module` should lie."""
    parent = sys.modules.get(module.rpartition(".")[0])
    return getattr(parent, "__path__", None) or [os.curdir]


def no_such_module(factory: str, missing: str) -> SpecError:
    """Return the error for a factory whose module, or a package around it, does not exist."""
    beside = [found.name for found in pkgutil.iter_modules(_folders_beside(missing))]
    near = f"{nearest_names(missing.rpartition('.')[2], beside)}; " if beside else ""
    return SpecError(
        f"factory={factory}: there is no module {missing}; {near}"
        "start from the folder that holds it, or install it"
    )


def loaded_sources() -> list[Path]:
    """Return the source files of all modules in memory that nobody installed: the user's own.

    After a factory has run, the code that made its model is among them. What is installed has a
    version instead, and fxpart's own code is known by its digest.
    """
    files = {
        Path(file).resolve()
        for name, module in list(sys.modules.items())
        if name != "__main__" and (file := getattr(module, "__file__", None)) is not None
    }
    return sorted(f for f in files if f.suffix == ".py" and is_own(f) and f.is_file())


def factory_digest(factory: str) -> str:
    """Return the SHA-256, in hex, of the factory's module and of what it imports of the user's own.

    Of a module that imports nothing of the user's, it is that of its file. The packages around the
    module are imported, the module is not: what it imports is read off its source. Of modules that
    `fxpart.capture.models.factory` has imported in this process it is that of the code in memory.

    Raises:
        SpecError: when the module or its file does not exist, or a package fails to import.

    """
    module, path = _factory_file(factory)
    own = own_imports(module, path) if is_own(path) else {}
    digest = source_digest(path, module)
    return stable_digest({"factory": digest, "imports": own}) if own else digest


@contextmanager
def factory_as_read(factory: str | None) -> Iterator[None]:
    """Keep what the factory's sources say, those that the block imports, and note what it reads.

    As `fxpart.capture.models.own_imports.as_read` and
    `fxpart.capture.models.files_read.noted_files`; of no factory it does nothing.
    """
    if factory is None:
        yield
        return
    see_working_directory()
    module, _ = split_factory(factory)
    with as_read(module), noted_files(factory, own_files(module)):
        yield


def factory_place(factory: str | None) -> str:
    """Return from where the factory reads files: another copy of it reads others."""
    if factory is None:
        return ""
    _, path = _factory_file(factory)
    return f"{path.resolve()} in {Path.cwd()}"


def _factory_file(factory: str) -> tuple[str, Path]:
    """Return the factory's module and its file. Raises what `factory_digest` does."""
    module, _ = split_factory(factory)
    see_working_directory()
    missing = module
    around = module.rpartition(".")[0]
    try:
        # To find a module is to import the packages that it lies in.
        is_new = around and around not in sys.modules
        with factory_as_read(factory) if is_new else nullcontext():
            found = importlib.util.find_spec(module)
    except ModuleNotFoundError as error:
        missing, found = error.name or module, None
        if module != missing and not module.startswith(f"{missing}."):
            # A package around the module exists, but imports something that does not.
            raise SpecError(
                f"factory={factory}: importing it fails{own_line(error)}: {one_line(error)}"
            ) from error
    except Exception as error:
        raise SpecError(
            f"factory={factory}: importing it fails{own_line(error)}: {one_line(error)}"
        ) from error
    if found is None:
        raise no_such_module(factory, missing)
    if not found.has_location or found.origin is None:
        raise SpecError(f"factory={factory}: module {module} has no source file; name one that has")
    return module, Path(found.origin)
