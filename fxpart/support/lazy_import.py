"""Import a package's public names on first use.

The module of each name is read from the package's stub, ``__init__.pyi``, which type checkers read
too, so names are listed only once. This is `lazy_loader.attach_stub` of Scientific Python's SPEC 1.
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
