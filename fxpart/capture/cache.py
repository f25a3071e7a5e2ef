"""Captured graphs on disk: one ``.npz`` a graph, plain arrays and text, never unpickled.

The file name is a hash of what decides the graph as far as it is known before anything runs; the
digests of the user's own source files, and of files that they read, known after, stand in the entry
and are checked when it is read. The whole folder can be deleted at any time.
"""

import hashlib
import json
import zipfile
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from fxpart.core.graph import OpGraph
from fxpart.core.symbolic_graph import OF_OPERATORS, OF_VALUES, SymbolicGraph
from fxpart.errors import CacheError, FxpartError
from fxpart.support.digest import file_digest, stable_digest
from fxpart.support.host import installed_version
from fxpart.support.whole_file import whole_file

__all__ = [
    "cache_key",
    "cached_path",
    "entry_sources",
    "files_read_of",
    "read_entry",
    "read_graph",
    "read_symbolic",
    "write_graph",
    "write_symbolic",
]


_Made = TypeVar("_Made")

_TEXT = ("names", "modules", "targets", "dtypes", "value_names", "weight_names")
_ADVICE = "make the folder writable, or set capture.cache_dir or capture.use_cache=false"
_ARRAYS = tuple(name for name in OpGraph.__slots__ if name not in _TEXT)
_FXPART = Path(__file__).resolve().parent.parent
_SOURCES = ("core/granularity.py", "core/graph.py", "core/phases.py", "capture")
"""The files and folders of code that makes graphs."""
_SYMBOLIC_SOURCES = ("core/symbolic_graph.py",)
"""The same, of what makes graphs in symbols beside it."""


@cache
def _source_digest(places: tuple[str, ...]) -> str:
    """Return a hash of the code at `places`, so that mending it makes old entries unused."""
    digest = hashlib.sha256()
    for place in places:
        path = _FXPART / place
        for file in [path] if path.suffix else sorted(path.rglob("*.py")):
            digest.update(file.read_bytes())
    return digest.hexdigest()


def cache_key(
    model: Mapping[str, object],
    level: str,
    phase: str = "inference",
    step: Mapping[str, object] | None = None,
    *,
    symbolic: bool = False,
) -> str:
    """Return the identity of a captured graph as 64 hex digits.

    `model` is everything that decides the model and its inputs (JSON-able); `level` is how it is
    captured, `phase` what of it, `step` what else decides a training step, and `symbolic` whether
    sizes are symbols. Versions of torch and fxpart, and fxpart's code that makes such graphs, are
    part of it.
    """
    parts = {
        "model": model,
        "level": level,
        "phase": phase,
        "step": dict(step or {}),
        "torch": installed_version("torch"),
        "fxpart": installed_version("fxpart"),
        "capture": _source_digest(_SOURCES),
        "symbolic": _source_digest(_SYMBOLIC_SOURCES) if symbolic else None,
    }
    return stable_digest(parts)


def cached_path(cache_dir: Path, key: str) -> Path:
    """Return where the graph with that key lies, or would lie."""
    return cache_dir / f"{key[:32]}.npz"


def write_graph(
    path: Path,
    graph: OpGraph,
    sources: Iterable[Path] = (),
    *,
    files_read: Mapping[Path, str] | None = None,
    place: str = "",
    text: Mapping[str, object] | None = None,
    arrays: Mapping[str, npt.NDArray[Any]] | None = None,
) -> None:
    """Write `graph` to `path`, whole or not at all.

    Args:
        path: the file; its folder is made.
        graph: what is kept.
        sources: files that decided the graph beside what the key says: when one of them changes,
            the entry no longer counts.
        files_read: files that decided it too, each with the `file_digest` that it had then.
        place: from where these were read; from elsewhere, others may be read in their stead.
        text: what else is kept (JSON-able), under names that no field of `OpGraph` has.
        arrays: arrays that are kept too, under other such names.

    Raises:
        CacheError: when the folder cannot be written.

    """
    kept = {**{name: list(getattr(graph, name)) for name in _TEXT}, **(text or {})}
    columns = {**{name: getattr(graph, name) for name in _ARRAYS}, **(arrays or {})}
    with whole_file(path, f"the captured graph to {path.parent}", _ADVICE) as temporary:
        kept["sources"] = {str(source): file_digest(source) for source in sources}
        kept["files_read"] = {str(file): known for file, known in (files_read or {}).items()}
        kept["place"] = place
        packed = np.frombuffer(json.dumps(kept).encode(), dtype=np.uint8)
        with temporary.open("wb") as file:  # of a mere name, numpy would make another one
            np.savez(file, text=packed, **columns)


def entry_sources(path: Path) -> Mapping[Path, str] | None:
    """Return the digest of each file that decided the entry at `path` beside what its key says.

    None where there is no entry, or it is damaged, or one of the files has changed since.
    """
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as stored:
            text = json.loads(stored["text"].tobytes().decode())
        return _unchanged({**text["sources"], **text["files_read"]})
    except (OSError, ValueError, KeyError, TypeError, zipfile.BadZipFile, EOFError):
        return None


def _unchanged(known: Mapping[str, str]) -> dict[Path, str] | None:
    """Return files with their digests, None when one is not what it was. Raises `OSError`."""
    files = {Path(path): digest for path, digest in known.items()}
    return files if all(file_digest(path) == said for path, said in files.items()) else None


def read_graph(path: Path, place: str = "") -> tuple[OpGraph, Mapping[Path, str]] | None:
    """Return the graph at `path` and the files that were read for it, with their digests.

    None when there is none, or it is damaged, out of date or of files of another `place`. Such an
    entry is as good as none: the caller captures again and overwrites it.
    """
    return read_entry(path, lambda graph, text, _arrays: (graph, files_read_of(text, place)))


def files_read_of(text: Mapping[str, Any], place: str) -> Mapping[Path, str]:
    """Return what the text of an entry says was read, as `write_graph` was given it.

    Raises `CacheError` when that was from another place.
    """
    files = {Path(path): str(digest) for path, digest in text["files_read"].items()}
    if files and text["place"] != place:
        raise CacheError(f"the graph was made of files as from {text['place']}, not from {place}")
    return files


def read_entry(
    path: Path,
    make: Callable[[OpGraph, Mapping[str, Any], Mapping[str, npt.NDArray[Any]]], _Made],
) -> _Made | None:
    """Return what `make` makes of an entry's graph, text and arrays, or None as `read_graph`.

    None too where `make` misses a name or is refused what it makes.
    """
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as stored:
            arrays: dict[str, Any] = dict(stored)
        text = json.loads(arrays.pop("text").tobytes().decode())
        if _unchanged({**text["sources"], **text["files_read"]}) is None:
            return None
        fields: dict[str, Any] = {name: arrays[name] for name in _ARRAYS}
        fields.update({name: tuple(text[name]) for name in _TEXT})
        return make(OpGraph(**fields), text, arrays)
    # A file that is not there, or not what we wrote, or that a source of is gone.
    except (OSError, ValueError, KeyError, TypeError, zipfile.BadZipFile, EOFError, FxpartError):
        return None


# Symbolic graphs on disk: entries of `fxpart.capture.cache` that hold the polynomials too.

_GROWING = (*OF_OPERATORS, *OF_VALUES)
_OF = "coefficients."
"""Before the name of the field that coefficients are of."""


def write_symbolic(
    path: Path,
    symbolic: SymbolicGraph,
    sources: Iterable[Path] = (),
    *,
    files_read: Mapping[Path, str] | None = None,
    place: str = "",
) -> None:
    """Write `symbolic` to `path`, whole or not at all.

    `sources` and, as from `place`, `files_read` decided the graph beside what its key says: see
    `write_graph`.

    Raises:
        CacheError: when the folder cannot be written.

    """
    text = {
        "symbols": list(symbolic.symbols),
        "captured_at": list(symbolic.captured_at),
        "exact_from": list(symbolic.exact_from),
        "ranges": [list(limits) for limits in symbolic.ranges],
    }
    arrays = {f"{_OF}{name}": symbolic.coefficients[name] for name in _GROWING}
    arrays |= {"exponents": symbolic.exponents, "value_batch_dim": symbolic.value_batch_dim}
    write_graph(
        path,
        symbolic.graph,
        sources,
        files_read=files_read,
        place=place,
        text=text,
        arrays=arrays,
    )


def read_symbolic(path: Path, place: str = "") -> tuple[SymbolicGraph, Mapping[Path, str]] | None:
    """Return the graph at `path` and the files that were read for it, as `read_graph` does."""
    return read_entry(
        path, lambda graph, text, arrays: (_made(graph, text, arrays), files_read_of(text, place))
    )


def _made(
    graph: OpGraph, text: Mapping[str, Any], arrays: Mapping[str, npt.NDArray[Any]]
) -> SymbolicGraph:
    return SymbolicGraph(
        graph=graph,
        symbols=tuple(text["symbols"]),
        captured_at=tuple(text["captured_at"]),
        exponents=arrays["exponents"],
        coefficients={name: arrays[f"{_OF}{name}"] for name in _GROWING},
        value_batch_dim=arrays["value_batch_dim"],
        ranges=tuple((low, high) for low, high in text["ranges"]),
        exact_from=tuple(text["exact_from"]),
    )
