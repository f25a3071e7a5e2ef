"""`symbolic_graph`: express sizes and costs of one capture as polynomials in its input sizes."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch import nn

from fxpart.capture.call_costs import CallCounter
from fxpart.capture.symbolic.dims import SymbolicDim
from fxpart.capture.symbolic.polynomials import DEGREE, Point, fitted, grid
from fxpart.capture.symbolic.program import SymbolicProgram, symbolic_program
from fxpart.capture.symbolic.symbol_range import Ranges
from fxpart.core.phases import StepOptions
from fxpart.core.symbolic_graph import OF_OPERATORS, OF_VALUES, SymbolicGraph
from fxpart.errors import CaptureError

__all__ = ["SymbolicProgram", "fitted_graph", "symbolic_graph", "symbolic_program"]


_FAR = 64
"""A size at which polynomials are checked besides the smallest, if within the range."""

_USUAL = StepOptions()


def fitted_graph(program: SymbolicProgram) -> SymbolicGraph:
    """Return polynomials for all sizes and costs of a program.

    `torch.export` keeps sizes as expressions. They are evaluated at a few points, exactly as in a
    capture of concrete sizes, and the integer polynomials through these points are checked at
    others. `SymbolicGraph.value_batch_dim` is -1 throughout.

    Raises:
        CaptureError: if a size is not a polynomial in the symbols, a condition of the capture fails
            at one of the points, or a range has fewer than three values.

    """
    start = [
        _start(*program.ranges[name], example=number) for name, number in _examples(program).items()
    ]
    points = dict.fromkeys([*grid(start), program.captured_at, *_checks(program)])
    counter = CallCounter()
    graphs = {point: program.operators(point, counter) for point in points}
    graph = program.whole(graphs[program.captured_at])
    tables, exponents = {}, np.empty((0, 0), dtype=np.int64)
    for field in (*OF_OPERATORS, *OF_VALUES):
        names = graph.names if field in OF_OPERATORS else graph.value_names
        columns = {point: getattr(g, field) for point, g in graphs.items()}
        exponents, tables[field] = fitted(columns, start, field, names)
    nonzero = np.any([table.any(axis=0) for table in tables.values()], axis=0)
    nonzero |= ~exponents.any(axis=1)
    return SymbolicGraph(
        graph=graph,
        symbols=tuple(program.torch_symbols),
        captured_at=program.captured_at,
        exponents=exponents[nonzero],
        coefficients={field: table[:, nonzero] for field, table in tables.items()},
        value_batch_dim=np.full(graph.n_values, -1, dtype=np.int64),
        ranges=tuple(program.ranges.values()),
        exact_from=program.exact_from,
    )


def _examples(program: SymbolicProgram) -> dict[str, int]:
    return dict(zip(program.torch_symbols, program.captured_at, strict=True))


def _start(low: int, high: int | None, example: int) -> int:
    """Return the smallest value to fit at: the example's, if enough of the range lies above it."""
    if high is None or example + DEGREE <= high:
        return example
    if high - DEGREE >= low:
        return high - DEGREE
    raise CaptureError(
        f"a size that can only be {low} to {high} is not symbolic; set capture.symbolic=none"
    )


def _checks(program: SymbolicProgram) -> list[Point]:
    """Return points to check polynomials at: all symbols at their minimum, and all far from it.

    The minimum is one from which the graph is exact.
    """
    lows = (low for low, _ in program.ranges.values())
    smallest = tuple(map(max, lows, program.exact_from))
    return [smallest, tuple(_far(*limits) for limits in program.ranges.values())]


def _far(low: int, top: int | None) -> int:
    """Return a value of the range that is far from its smallest one, where it has any."""
    far = max(_FAR, 2 * low)
    return far if top is None else min(far, top)


def symbolic_graph(
    module: nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    dims: Sequence[SymbolicDim] = (),
    phase: str = "inference",
    options: StepOptions = _USUAL,
    ranges: Ranges | None = None,
) -> SymbolicGraph:
    """Return the graph of `module`, or of its training step, as polynomials in its input sizes.

    See `symbolic_program` for the arguments. `SymbolicGraph.value_batch_dim` is -1 throughout.

    Raises:
        SpecError: if `dims` is empty, or names dimensions that the example inputs lack.
        CaptureError: if the module cannot be captured with these sizes symbolic, or a size is not a
            polynomial in them.

    """
    program = symbolic_program(
        module, args, kwargs, dims=dims, phase=phase, options=options, ranges=ranges
    )
    return fitted_graph(program)
