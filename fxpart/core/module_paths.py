"""Dotted paths of modules and their tensors; ``""`` is the model itself."""

from collections.abc import Container
from functools import lru_cache

__all__ = ["block_of", "covering", "is_within", "owner", "parents", "shared_parent"]


def owner(tensor: str) -> str:
    """Return the path of the module that owns the tensor."""
    return tensor.rpartition(".")[0]


def is_within(path: str, module: str) -> bool:
    """Return whether `path` is `module` or inside it."""
    return not module or path == module or path.startswith(f"{module}.")


@lru_cache(maxsize=1 << 14)
def parents(path: str) -> tuple[str, ...]:
    """Return `path` and its enclosing modules, innermost first, up to ``""``."""
    return (path, *parents(owner(path))) if path else ("",)


def covering(path: str, keys: Container[str]) -> str | None:
    """Return the longest key that is `path` or encloses it, or None."""
    return next((parent for parent in parents(path) if parent in keys), None)


def shared_parent(a: str, b: str) -> str:
    """Return the innermost module that contains (or is) both `a` and `b`."""
    return next(parent for parent in parents(a) if is_within(b, parent))


@lru_cache(maxsize=1 << 14)
def block_of(path: str) -> str:
    """Return the outermost numbered module on a path, such as ``model.layers.3``, or ``""``.

    These are the modules that users usually pass to `fully_shard`.
    """
    parts = path.split(".")
    number = next((i for i, part in enumerate(parts) if part.isdigit()), None)
    return "" if number is None else ".".join(parts[: number + 1])
