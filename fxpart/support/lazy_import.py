"""A package's public names, each imported when it is first used.

Where a name lives is read from the package's stub, ``__init__.pyi``, which type checkers read too:
so no name stands twice. The way of `lazy_loader.attach_stub`, in SPEC 1 of Scientific Python.
"""

import ast
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

__all__ = ["attach_stub"]


def attach_stub(package: str, file: str) -> tuple[Callable[[str], object], list[str]]:
    """Return the ``__getattr__`` and ``__all__`` of a package; `file` is its `__init__`."""
    stub = ast.parse(Path(file).with_suffix(".pyi").read_text(encoding="utf-8"))
    home_of = {
        alias.name: node.module
        for node in stub.body
        if isinstance(node, ast.ImportFrom) and node.module
        for alias in node.names
    }

    def import_name(name: str) -> object:
        if name not in home_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(home_of[name]), name)

    return import_name, list(home_of)
