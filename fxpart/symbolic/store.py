"""Symbolic graphs on disk: one ``.npz`` a graph, plain arrays and text, never unpickled.

As `fxpart.graph_cache` keeps graphs, whose keys and folder serve here too; the captured graph is in
the same file, with ``graph.`` before the names of its arrays.
"""

import hashlib
import json
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from fxpart.errors import FxpartError
from fxpart.graph import OpGraph
from fxpart.symbolic.graph import OF_OPERATORS, OF_VALUES, SymbolicGraph
from fxpart.whole_file import whole_file

__all__ = ["read_symbolic", "write_symbolic"]

_TEXT = ("names", "modules", "targets", "dtypes", "value_names", "weight_names")
_ARRAYS = tuple(name for name in OpGraph.__slots__ if name not in _TEXT)
_GROWING = (*OF_OPERATORS, *OF_VALUES)
_ADVICE = "make the folder writable, or set capture.cache_dir or capture.use_cache=false"


def write_symbolic(path: Path, symbolic: SymbolicGraph, sources: Iterable[Path] = ()) -> None:
    """Write `symbolic` to `path`, whole or not at all.

    `sources` are files that decided the graph beside what its key says: when one of them changes,
    the entry no longer counts.

    Raises:
        CacheError: when the folder cannot be written.

    """
    graph = symbolic.graph
    text: dict[str, object] = {name: list(getattr(graph, name)) for name in _TEXT}
    text["symbols"] = list(symbolic.symbols)
    text["captured_at"] = list(symbolic.captured_at)
    text["exact_from"] = list(symbolic.exact_from)
    text["ranges"] = [list(limits) for limits in symbolic.ranges]
    arrays = {f"graph.{name}": getattr(graph, name) for name in _ARRAYS}
    arrays |= {f"coefficients.{name}": symbolic.coefficients[name] for name in _GROWING}
    arrays |= {"exponents": symbolic.exponents, "value_batch_dim": symbolic.value_batch_dim}
    with whole_file(path, f"the symbolic graph to {path.parent}", _ADVICE) as temporary:
        text["sources"] = {str(source): _digest(source) for source in sources}
        packed = np.frombuffer(json.dumps(text).encode(), dtype=np.uint8)
        with temporary.open("wb") as file:  # of a mere name, numpy would make another one
            np.savez(file, allow_pickle=False, text=packed, **arrays)


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def read_symbolic(path: Path) -> SymbolicGraph | None:
    """Return the graph at `path`, or None when there is none, or it is damaged or out of date.

    Such an entry is as good as none: the caller captures again and overwrites it.
    """
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as stored:
            text = json.loads(stored["text"].tobytes().decode())
            fields: dict[str, Any] = {name: stored[f"graph.{name}"] for name in _ARRAYS}
            tables = {name: stored[f"coefficients.{name}"] for name in _GROWING}
            exponents, batch_dim = stored["exponents"], stored["value_batch_dim"]
        if any(_digest(Path(source)) != known for source, known in text["sources"].items()):
            return None
        fields.update({name: tuple(text[name]) for name in _TEXT})
        return SymbolicGraph(
            graph=OpGraph(**fields),
            symbols=tuple(text["symbols"]),
            captured_at=tuple(text["captured_at"]),
            exponents=exponents,
            coefficients=tables,
            value_batch_dim=batch_dim,
            ranges=tuple((low, high) for low, high in text["ranges"]),
            exact_from=tuple(text["exact_from"]),
        )
    # A file that is not there, or not what we wrote, or that a source of is gone.
    except (OSError, ValueError, KeyError, TypeError, zipfile.BadZipFile, EOFError, FxpartError):
        return None
