"""Cache captured graphs on disk: one ``.npz`` per graph, plain arrays and text, never unpickled.

The file name is a hash of everything that determines the graph. The folder can be deleted at any
time.
"""

import json
import os
import zipfile
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from fxpart.core.graph import OpGraph
from fxpart.core.symbolic_graph import OF_OPERATORS, OF_VALUES, SymbolicGraph
from fxpart.errors import CacheError, FxpartError
from fxpart.support.digest import code_digest, stable_digest
from fxpart.support.host import installed_version
from fxpart.support.regular_file import regular_status
from fxpart.support.whole_file import whole_file

__all__ = [
    "cache_key",
    "cached_path",
    "read_graph",
    "read_symbolic",
    "refuse_unwritable",
    "write_graph",
    "write_symbolic",
]


_Made = TypeVar("_Made")

_TEXT = (
    "names",
    "modules",
    "targets",
    "dtypes",
    "value_names",
    "weight_names",
    "unread_weight_names",
)
_ADVICE = "make the folder writable, or set capture.cache_dir or capture.use_cache=false"
_ARRAYS = tuple(name for name in OpGraph.__slots__ if name not in _TEXT)
_FXPART = Path(__file__).resolve().parent.parent
_SOURCES = ("core/granularity.py", "core/graph.py", "core/phases.py", "capture", "sharding")
"""Code that builds graphs; changing it invalidates old entries."""
_SYMBOLIC_SOURCES = ("core/symbolic_graph.py",)
"""Additional code that builds symbolic graphs."""


def cache_key(
    model: Mapping[str, object],
    level: str,
    phase: str = "inference",
    step: Mapping[str, object] | None = None,
    *,
    symbolic: bool = False,
) -> str:
    """Return the identity of a captured graph as 64 hex digits.

    It includes the versions of torch and fxpart, and fxpart's code that builds such graphs.

    Args:
        model: everything that determines the model and its inputs (JSON-serializable).
        level: level of the capture.
        phase: captured phase.
        step: everything else that determines a training step.
        symbolic: whether sizes are symbolic.

    """
    sources = (*_SOURCES, *(_SYMBOLIC_SOURCES if symbolic else ()))
    parts = {
        "model": model,
        "level": level,
        "phase": phase,
        "step": dict(step or {}),
        "torch": installed_version("torch"),
        "fxpart": installed_version("fxpart"),
        "code": {source: code_digest(_FXPART / source) for source in sources},
    }
    return stable_digest(parts)


def cached_path(cache_dir: Path, key: str) -> Path:
    """Return the path of the graph with that key, which need not exist."""
    return cache_dir / f"{key[:32]}.npz"


def refuse_unwritable(path: Path) -> None:
    """Refuse an unwritable folder before time is wasted on a capture.

    A missing folder is not created yet.

    Raises:
        CacheError: if the folder, or its nearest existing parent, cannot be written.

    """
    failure = f"cannot write the captured graph to {path.parent}"
    try:
        nearest = next(folder for folder in path.absolute().parents if folder.exists())
    except OSError as error:
        raise CacheError(f"{failure}: {error.strerror or error}; {_ADVICE}") from error
    if not nearest.is_dir():
        raise CacheError(f"{failure}: {nearest} is not a directory; {_ADVICE}")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise CacheError(f"{failure}: it is not writable; {_ADVICE}")


def write_graph(
    path: Path,
    graph: OpGraph,
    *,
    text: Mapping[str, object] | None = None,
    arrays: Mapping[str, npt.NDArray[Any]] | None = None,
) -> None:
    """Write `graph` to `path` atomically.

    Args:
        path: the file, whose folder is created.
        graph: the graph to store.
        text: further data (JSON-serializable), under names that are not fields of `OpGraph`.
        arrays: further arrays, under other such names.

    Raises:
        CacheError: if the folder cannot be written.

    """
    fields = {**{name: list(getattr(graph, name)) for name in _TEXT}, **(text or {})}
    columns = {**{name: getattr(graph, name) for name in _ARRAYS}, **(arrays or {})}
    with whole_file(path, f"the captured graph to {path.parent}", _ADVICE) as temporary:
        packed = np.frombuffer(json.dumps(fields).encode(), dtype=np.uint8)
        with temporary.open("wb") as file:  # given a name, numpy would change it
            np.savez(file, text=packed, **columns)


def read_graph(path: Path) -> OpGraph | None:
    """Return the graph at `path`, or None if it is missing or damaged.

    The caller then captures again and overwrites the entry.
    """
    return _read_entry(path, lambda graph, _text, _arrays: graph)


def _read_entry(
    path: Path,
    make: Callable[[OpGraph, Mapping[str, Any], Mapping[str, npt.NDArray[Any]]], _Made],
) -> _Made | None:
    """Return the result of `make` for an entry's graph, text and arrays; None as in `read_graph`.

    Also None if `make` misses a name or fails with an `FxpartError`.
    """
    try:
        regular_status(path)
        with path.open("rb") as file, np.load(file, allow_pickle=False) as stored:
            _refuse_packed(stored.zip)
            arrays: dict[str, Any] = dict(stored)
        text = json.loads(arrays.pop("text").tobytes().decode())
        _refuse_other_types(arrays, text)
        fields: dict[str, Any] = {name: arrays[name] for name in _ARRAYS}
        fields.update({name: tuple(text[name]) for name in _TEXT})
        return make(OpGraph(**fields), text, arrays)
    except _NOT_OURS:
        return None


_NOT_OURS = (
    OSError,
    EOFError,
    ValueError,
    KeyError,
    TypeError,
    AttributeError,
    IndexError,
    OverflowError,
    MemoryError,
    RuntimeError,  # encrypted member, unknown compression, or JSON nested too deep
    zipfile.BadZipFile,
    zlib.error,
    FxpartError,
)
"""Errors raised for a file that is missing or not written by this module."""


def _refuse_packed(archive: zipfile.ZipFile) -> None:
    """Refuse compressed members, which we never write, so that a small file cannot expand hugely.

    Raises:
        ValueError: if a member is compressed, naming it.

    """
    for member in archive.infolist():
        if member.compress_type != zipfile.ZIP_STORED:
            raise ValueError(f"{member.filename} is packed")


def _refuse_other_types(arrays: Mapping[str, npt.NDArray[Any]], text: Mapping[str, Any]) -> None:
    for name, array in arrays.items():
        expected = np.bool_ if name in _MASKS else np.int64
        dimensions = 2 if name in _TABLES or name.startswith(_PREFIX) else 1
        if array.dtype != expected or array.ndim != dimensions:
            raise ValueError(f"{name} has another type or shape")
    tensors = arrays["state_tensor_bytes"]
    if len(tensors) and tensors.shape[1] != len(arrays["weight_bytes"]):
        raise ValueError("state_tensor_bytes has another number of weights")
    attention = arrays["attention"]
    if len(attention) and (attention.shape[1] != 3 or attention.min() < 0):
        raise ValueError("attention has another shape")
    for name in _TEXT:
        if not isinstance(text[name], list) or not all(isinstance(t, str) for t in text[name]):
            raise ValueError(f"{name} is no list of text")


# Entries of symbolic graphs also contain the polynomials.

_MASKS = ("value_is_output", "weight_is_buffer")
_TABLES = ("state_tensor_bytes", "attention", "exponents")
_GROWING = (*OF_OPERATORS, *OF_VALUES)
_PREFIX = "coefficients."
"""Prefix of the field name of coefficients."""


def write_symbolic(path: Path, symbolic: SymbolicGraph) -> None:
    """Write `symbolic` to `path` atomically.

    Raises:
        CacheError: if the folder cannot be written.

    """
    text = {
        "symbols": list(symbolic.symbols),
        "captured_at": list(symbolic.captured_at),
        "exact_from": list(symbolic.exact_from),
        "ranges": [list(limits) for limits in symbolic.ranges],
    }
    arrays = {f"{_PREFIX}{name}": symbolic.coefficients[name] for name in _GROWING}
    arrays |= {"exponents": symbolic.exponents, "value_batch_dim": symbolic.value_batch_dim}
    write_graph(path, symbolic.graph, text=text, arrays=arrays)


def read_symbolic(path: Path) -> SymbolicGraph | None:
    """Return the symbolic graph at `path`; None as in `read_graph`."""
    return _read_entry(path, _symbolic_graph)


def _symbolic_graph(
    graph: OpGraph, text: Mapping[str, Any], arrays: Mapping[str, npt.NDArray[Any]]
) -> SymbolicGraph:
    return SymbolicGraph(
        graph=graph,
        symbols=tuple(text["symbols"]),
        captured_at=tuple(text["captured_at"]),
        exponents=arrays["exponents"],
        coefficients={name: arrays[f"{_PREFIX}{name}"] for name in _GROWING},
        value_batch_dim=arrays["value_batch_dim"],
        ranges=tuple((low, high) for low, high in text["ranges"]),
        exact_from=tuple(text["exact_from"]),
    )
