"""Symbolic graphs on disk: entries of `fxpart.graph_cache` that hold the polynomials too."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy.typing as npt

from fxpart.graph import OpGraph
from fxpart.graph_cache import read_entry, write_graph
from fxpart.symbolic.graph import OF_OPERATORS, OF_VALUES, SymbolicGraph

__all__ = ["read_symbolic", "write_symbolic"]

_GROWING = (*OF_OPERATORS, *OF_VALUES)
_OF = "coefficients."
"""Before the name of the field that coefficients are of."""


def write_symbolic(path: Path, symbolic: SymbolicGraph, sources: Iterable[Path] = ()) -> None:
    """Write `symbolic` to `path`, whole or not at all.

    `sources` are files that decided the graph beside what its key says: when one of them changes,
    the entry no longer counts.

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
    write_graph(path, symbolic.graph, sources, text=text, arrays=arrays)


def read_symbolic(path: Path) -> SymbolicGraph | None:
    """Return the graph at `path`, or None when there is none, or it is damaged or out of date.

    Such an entry is as good as none: the caller captures again and overwrites it.
    """
    return read_entry(path, _made)


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
