"""Captured graphs on disk: one ``.npz`` a graph, plain arrays and text, never unpickled.

The file name is a hash of all that decides the graph. The folder can be deleted at any time.
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

_TEXT = ("names", "modules", "targets", "dtypes", "value_names", "weight_names")
_ADVICE = "make the folder writable, or set capture.cache_dir or capture.use_cache=false"
_ARRAYS = tuple(name for name in OpGraph.__slots__ if name not in _TEXT)
_FXPART = Path(__file__).resolve().parent.parent
_SOURCES = ("core/granularity.py", "core/graph.py", "core/phases.py", "capture", "sharding")
"""The code that makes graphs: mending it makes old entries unused."""
_SYMBOLIC_SOURCES = ("core/symbolic_graph.py",)
"""The code that makes graphs in symbols, beside it."""


def cache_key(
    model: Mapping[str, object],
    level: str,
    phase: str = "inference",
    step: Mapping[str, object] | None = None,
    *,
    symbolic: bool = False,
) -> str:
    """Return the identity of a captured graph as 64 hex digits.

    Versions of torch and fxpart, and fxpart's code that makes such graphs, are part of it.

    Args:
        model: everything that decides the model and its inputs (JSON-able).
        level: how it is captured.
        phase: what of it.
        step: what else decides a training step.
        symbolic: whether sizes are symbols.

    """
    sources = (*_SOURCES, *(_SYMBOLIC_SOURCES if symbolic else ()))
    parts = {
        "model": model,
        "level": level,
        "phase": phase,
        "step": dict(step or {}),
        "torch": installed_version("torch"),
        "fxpart": installed_version("fxpart"),
        "code": {place: code_digest(_FXPART / place) for place in sources},
    }
    return stable_digest(parts)


def cached_path(cache_dir: Path, key: str) -> Path:
    """Return where the graph with that key lies, or would lie."""
    return cache_dir / f"{key[:32]}.npz"


def refuse_unwritable(path: Path) -> None:
    """Refuse a folder that cannot be written, before a capture is made for nothing.

    One that is missing is not made yet.

    Raises:
        CacheError: when the folder, or the nearest above it that exists, cannot be written.

    """
    what = f"cannot write the captured graph to {path.parent}"
    try:
        nearest = next(folder for folder in path.absolute().parents if folder.exists())
    except OSError as error:
        raise CacheError(f"{what}: {error.strerror or error}; {_ADVICE}") from error
    if not nearest.is_dir():
        raise CacheError(f"{what}: {nearest} is not a directory; {_ADVICE}")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise CacheError(f"{what}: it is not writable; {_ADVICE}")


def write_graph(
    path: Path,
    graph: OpGraph,
    *,
    text: Mapping[str, object] | None = None,
    arrays: Mapping[str, npt.NDArray[Any]] | None = None,
) -> None:
    """Write `graph` to `path`, whole or not at all.

    Args:
        path: the file; its folder is made.
        graph: what is kept.
        text: what else is kept (JSON-able), under names that no field of `OpGraph` has.
        arrays: arrays that are kept too, under other such names.

    Raises:
        CacheError: when the folder cannot be written.

    """
    kept = {**{name: list(getattr(graph, name)) for name in _TEXT}, **(text or {})}
    columns = {**{name: getattr(graph, name) for name in _ARRAYS}, **(arrays or {})}
    with whole_file(path, f"the captured graph to {path.parent}", _ADVICE) as temporary:
        packed = np.frombuffer(json.dumps(kept).encode(), dtype=np.uint8)
        with temporary.open("wb") as file:  # of a mere name, numpy would make another one
            np.savez(file, text=packed, **columns)


def read_graph(path: Path) -> OpGraph | None:
    """Return the graph at `path`; None when there is none, or it is damaged.

    Such an entry is as good as none: the caller captures again and overwrites it.
    """
    return _read_entry(path, lambda graph, _text, _arrays: graph)


def _read_entry(
    path: Path,
    make: Callable[[OpGraph, Mapping[str, Any], Mapping[str, npt.NDArray[Any]]], _Made],
) -> _Made | None:
    """Return what `make` makes of an entry's graph, text and arrays; None as `read_graph`.

    None too where `make` misses a name or fails with an `FxpartError`.
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
    RuntimeError,  # of an encrypted member, an unknown way of packing, or JSON that is too deep
    zipfile.BadZipFile,
    zlib.error,
    FxpartError,
)
"""What comes of a file that is not there, or not what we wrote."""


def _refuse_packed(archive: zipfile.ZipFile) -> None:
    """Refuse members that are packed, which ours are not: a small file must not become a huge one.

    Raises:
        ValueError: naming one.

    """
    for member in archive.infolist():
        if member.compress_type != zipfile.ZIP_STORED:
            raise ValueError(f"{member.filename} is packed")


def _refuse_other_types(arrays: Mapping[str, npt.NDArray[Any]], text: Mapping[str, Any]) -> None:
    for name, array in arrays.items():
        expected = np.bool_ if name == "value_is_output" else np.int64
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


# Symbolic graphs are entries that hold the polynomials too.

_TABLES = ("state_tensor_bytes", "attention", "exponents")
_GROWING = (*OF_OPERATORS, *OF_VALUES)
_PREFIX = "coefficients."
"""Before the name of the field that coefficients are of."""


def write_symbolic(path: Path, symbolic: SymbolicGraph) -> None:
    """Write `symbolic` to `path`, whole or not at all.

    Raises:
        CacheError: when the folder cannot be written.

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
    """Return the symbolic graph at `path`; None as `read_graph`."""
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
