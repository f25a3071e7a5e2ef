"""Symbolic graphs on disk: entries of `fxpart.graph_cache` that hold the polynomials too."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy.typing as npt

from fxpart.graph import OpGraph
from fxpart.graph_cache import files_read_of, read_entry, write_graph
from fxpart.symbolic.graph import OF_OPERATORS, OF_VALUES, SymbolicGraph

__all__ = ["read_symbolic", "write_symbolic"]

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
