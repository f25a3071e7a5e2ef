"""`SymbolicGraph`: a captured model whose sizes are polynomials, for example in its batch size.

The structure of the model is that of one `OpGraph`. The bytes and FLOPs of each operator or value
are a row of integer coefficients, so evaluating the graph at any size is a matrix product.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from fxpart.core.graph import IntArray, OpGraph
from fxpart.errors import SpecError, nearest_names

__all__ = ["OF_OPERATORS", "OF_VALUES", "SymbolicGraph", "on_graph", "with_constant_symbol"]

OF_OPERATORS = ("flops", "moved_bytes")
"""Fields of `OpGraph` that depend on the symbols, one row per operator."""
OF_VALUES = ("value_bytes", "value_alloc_bytes")
"""Fields of `OpGraph` that depend on the symbols, one row per value."""

_MOST = 2**63 - 1
"""The largest int64."""


@dataclass(frozen=True, eq=False, slots=True)
class SymbolicGraph:
    """A graph whose sizes are polynomials with integer coefficients in ``len(symbols)`` symbols.

    With ``n`` operators, ``V`` values, ``M`` monomials. All integer arrays are int64.

    Raises:
        SpecError: if the fields contradict each other.

    """

    graph: OpGraph
    """The model at the captured sizes."""
    symbols: tuple[str, ...]
    """Names of the symbols, such as ``("batch", "seq_len")``, without duplicates."""
    captured_at: tuple[int, ...]
    """The value of each symbol in `graph`."""
    exponents: IntArray
    """Shape (M, len(symbols)): monomial m is the product of the symbols raised to these exponents.
    Rows are distinct."""
    coefficients: Mapping[str, IntArray]
    """Coefficients by field of `OpGraph`: shape (n, M) for `OF_OPERATORS`, (V, M) for
    `OF_VALUES`."""
    value_batch_dim: IntArray
    """Batch dimension of each value; -1 for a replicated value, -2 for a partial sum. Length V."""
    ranges: tuple[tuple[int, int | None], ...] = field(default=())
    """Smallest and largest valid value of each symbol; None for no upper limit. Empty: any value
    from 1."""
    exact_from: tuple[int, ...] = field(default=())
    """The value of each symbol, 1 or 2, from which the graph equals a capture at concrete sizes. A
    capture at size 1 may lack copies and gradient sums that this graph has; then this graph is an
    upper bound. Empty: from 1."""

    def __post_init__(self) -> None:
        """Check the shapes, and that the polynomials reproduce the captured graph."""
        if not self.symbols or len(set(self.symbols)) != len(self.symbols):
            raise SpecError(f"symbols={self.symbols} must be one or more names, each once")
        if len(self.captured_at) != len(self.symbols):
            raise SpecError("a symbolic graph must say the value of each symbol that it is at")
        if self.exponents.ndim != 2 or self.exponents.shape[1] != len(self.symbols):
            raise SpecError("exponents must have one column a symbol")
        if len(np.unique(self.exponents, axis=0)) != len(self.exponents):
            raise SpecError("exponents must have each monomial once")
        if {len(self.ranges), len(self.exact_from)} - {0, len(self.symbols)}:
            raise SpecError("a symbolic graph must say the range of each symbol, or of none")
        if set(self.coefficients) != {*OF_OPERATORS, *OF_VALUES}:
            raise SpecError(f"coefficients must be of {', '.join((*OF_OPERATORS, *OF_VALUES))}")
        monomials = len(self.exponents)
        for name, table in self.coefficients.items():
            rows = self.graph.n_ops if name in OF_OPERATORS else self.graph.n_values
            if table.shape != (rows, monomials):
                raise SpecError(
                    f"coefficients of {name} have shape {table.shape}, not {(rows, monomials)}"
                )
        if len(self.value_batch_dim) != self.graph.n_values:
            raise SpecError("value_batch_dim must have one number a value")
        self._check_graph()

    def _check_graph(self) -> None:
        powers = self._monomials(dict(zip(self.symbols, self.captured_at, strict=True)))
        for name, table in self.coefficients.items():
            if not np.array_equal(_product(name, table, powers), getattr(self.graph, name)):
                raise SpecError(f"coefficients of {name} do not give what the captured graph has")

    def at(self, **sizes: int) -> OpGraph:
        """Return the graph at a value for each symbol, such as ``at(batch=8)``.

        All arrays except the four symbolic fields are shared. O((n + V) M).

        Raises:
            SpecError: if a symbol is unknown or missing, a value is not an integer or is outside
                the captured range, or a size overflows int64.

        """
        self.check_sizes(sizes)
        powers = self._monomials(sizes)
        columns = {name: _product(name, table, powers) for name, table in self.coefficients.items()}
        return replace(
            self.graph,
            flops=columns["flops"],
            moved_bytes=columns["moved_bytes"],
            value_bytes=columns["value_bytes"],
            value_alloc_bytes=columns["value_alloc_bytes"],
        )

    def check_sizes(self, sizes: Mapping[str, int]) -> None:
        """Check that `sizes` has a valid value for each symbol.

        Raises:
            SpecError: as `at`, except for overflow.

        """
        for name in sizes:
            if name not in self.symbols:
                raise SpecError(f"{name} is not symbolic here; {nearest_names(name, self.symbols)}")
        for index, name in enumerate(self.symbols):
            if name not in sizes:
                raise SpecError(f"a size of {name} is missing; give one for each symbol")
            low, high = self.ranges[index] if self.ranges else (1, None)
            value = sizes[name]
            if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
                raise SpecError(f"{name}={value} must be a whole number, 1 or more")
            if value < low or (high is not None and value > high):
                limit = f"from {low}" if high is None else f"from {low} to {high}"
                raise SpecError(f"{name}={value} is outside what was captured; choose {limit}")

    def _monomials(self, sizes: Mapping[str, int]) -> list[int]:
        """Return the exact value of each monomial."""
        return [
            math.prod(
                int(sizes[name]) ** power for name, power in zip(self.symbols, row, strict=True)
            )
            for row in self.exponents.tolist()
        ]


def _product(name: str, table: IntArray, monomials: list[int]) -> IntArray:
    """Evaluate the polynomials in the rows of `table`.

    Their sum, not just each value, must fit in int64, since every load and peak is a partial sum.
    """
    # An unused monomial need not fit in int64.
    is_used: list[bool] = np.any(table, axis=0).tolist()
    used = [monomial if occurs else 0 for occurs, monomial in zip(is_used, monomials, strict=True)]
    total_bound: float = max(used, default=0)  # may be larger than any float
    if total_bound <= _MOST:
        bounds = np.abs(table).sum(axis=0, dtype=np.float64).tolist()
        total_bound = sum(total * monomial for total, monomial in zip(bounds, used, strict=True))
    if _MOST / 2 < total_bound <= 2 * _MOST:
        # Near the limit, recompute exactly with Python's unbounded integers.
        bounds = np.abs(table.astype(object)).sum(axis=0).tolist()
        total_bound = sum(total * monomial for total, monomial in zip(bounds, used, strict=True))
    if total_bound > _MOST:
        raise SpecError(f"{name} at these sizes is more than an int64 holds; choose smaller ones")
    product: IntArray = table @ np.array(used, dtype=np.int64)
    return product


def on_graph(symbolic: SymbolicGraph, graph: OpGraph) -> SymbolicGraph:
    """Return `symbolic` with its graph replaced by `graph`, which may append to it.

    The sizes of appended operators and values, such as weight updates, do not depend on any symbol.
    Groups, outputs and reads may differ.

    Raises:
        SpecError: if `graph` does not begin with the operators, values and sizes of `symbolic`.

    """
    captured = symbolic.graph
    if (
        graph.names[: captured.n_ops] != captured.names
        or graph.value_names[: captured.n_values] != captured.value_names
    ):
        raise SpecError("a symbolic graph keeps its operators and values: add others only behind")
    constant = np.flatnonzero(~symbolic.exponents.any(axis=1))
    exponents, coefficients = symbolic.exponents, dict(symbolic.coefficients)
    if not len(constant):
        exponents = np.vstack([exponents, np.zeros_like(exponents[:1])])
        constant = np.array([len(exponents) - 1])
    for name, table in symbolic.coefficients.items():
        column: IntArray = getattr(graph, name)
        wide = np.zeros((len(column), len(exponents)), dtype=np.int64)
        wide[: len(table), : table.shape[1]] = table
        wide[len(table) :, constant[0]] = column[len(table) :]
        coefficients[name] = wide
    added = graph.n_values - captured.n_values
    return replace(
        symbolic,
        graph=graph,
        exponents=exponents,
        coefficients=coefficients,
        value_batch_dim=np.append(symbolic.value_batch_dim, np.full(added, -1)),
    )


def with_constant_symbol(
    symbolic: SymbolicGraph, name: str, value: int, limits: tuple[int, int | None]
) -> SymbolicGraph:
    """Return `symbolic` with an appended symbol that no size depends on, valid within `limits`."""
    ranges = symbolic.ranges or ((1, None),) * len(symbolic.symbols)
    exact_from = symbolic.exact_from or (1,) * len(symbolic.symbols)
    zero_exponents = np.zeros((len(symbolic.exponents), 1), dtype=np.int64)
    return replace(
        symbolic,
        symbols=(*symbolic.symbols, name),
        captured_at=(*symbolic.captured_at, value),
        exponents=np.hstack([symbolic.exponents, zero_exponents]),
        ranges=(*ranges, limits),
        exact_from=(*exact_from, 1),
    )
