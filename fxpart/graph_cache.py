"""Captured graphs on disk: one ``.npz`` a graph, plain arrays and text, never unpickled.

The file name is a hash of what decides the graph as far as it is known before anything runs; the
digests of the user's own source files, known after, stand in the entry and are checked when it is
read. The whole folder can be deleted at any time.
"""

import hashlib
import json
import zipfile
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from fxpart.errors import FxpartError
from fxpart.graph import OpGraph
from fxpart.installed import installed_version
from fxpart.stable_json import stable_digest
from fxpart.whole_file import whole_file

__all__ = ["cache_key", "cached_path", "read_graph", "write_graph"]

_TEXT = ("names", "modules", "targets", "dtypes", "value_names", "weight_names")
_ADVICE = "make the folder writable, or set capture.cache_dir or capture.use_cache=false"
_ARRAYS = tuple(name for name in OpGraph.__slots__ if name not in _TEXT)


@cache
def _capture_source_digest() -> str:
    """Return a hash of the code that makes graphs, so that mending it makes old entries unused."""
    digest = hashlib.sha256()
    folder = Path(__file__).parent
    rooms = ("capture", "models", "symbolic", "batch_dim")
    sources = [path for room in rooms for path in (folder / room).rglob("*.py")]
    for path in [folder / "graph.py", folder / "granularity.py", *sorted(sources)]:
        digest.update(path.read_bytes())
    return digest.hexdigest()


def cache_key(
    model: Mapping[str, object],
    level: str,
    phase: str = "inference",
    step: Mapping[str, object] | None = None,
) -> str:
    """Return the identity of a captured graph as 64 hex digits.

    `model` is everything that decides the model and its inputs (JSON-able); `level` is how it is
    captured, `phase` what of it, and `step` what else decides a training step. Versions of torch
    and fxpart, and fxpart's capture code, are part of it.
    """
    parts = {
        "model": model,
        "level": level,
        "phase": phase,
        "step": dict(step or {}),
        "torch": installed_version("torch"),
        "fxpart": installed_version("fxpart"),
        "capture": _capture_source_digest(),
    }
    return stable_digest(parts)


def cached_path(cache_dir: Path, key: str) -> Path:
    """Return where the graph with that key lies, or would lie."""
    return cache_dir / f"{key[:32]}.npz"


def write_graph(path: Path, graph: OpGraph, sources: Iterable[Path] = ()) -> None:
    """Write `graph` to `path`, whole or not at all.

    `sources` are files that decided the graph beside what the key says: when one of them changes,
    the entry no longer counts.

    Raises:
        CacheError: when the folder cannot be written.

    """
    text: dict[str, object] = {name: list(getattr(graph, name)) for name in _TEXT}
    with whole_file(path, f"the captured graph to {path.parent}", _ADVICE) as temporary:
        text["sources"] = {str(source): _digest(source) for source in sources}
        packed = np.frombuffer(json.dumps(text).encode(), dtype=np.uint8)
        arrays = {name: getattr(graph, name) for name in _ARRAYS}
        with temporary.open("wb") as file:  # of a mere name, numpy would make another one
            np.savez(file, text=packed, **arrays)


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def read_graph(path: Path) -> OpGraph | None:
    """Return the graph at `path`, or None when there is none, or it is damaged or out of date.

    Such an entry is as good as none: the caller captures again and overwrites it.
    """
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as stored:
            text = json.loads(stored["text"].tobytes().decode())
            fields: dict[str, Any] = {name: stored[name] for name in _ARRAYS}
        if any(_digest(Path(source)) != known for source, known in text["sources"].items()):
            return None
        fields.update({name: tuple(text[name]) for name in _TEXT})
        return OpGraph(**fields)
    # A file that is not there, or not what we wrote, or that a source of is gone.
    except (OSError, ValueError, KeyError, TypeError, zipfile.BadZipFile, EOFError, FxpartError):
        return None
