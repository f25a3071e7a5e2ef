"""One capture with symbolic input sizes: `symbolic_graph`.

`torch.export` keeps the sizes as expressions. They are evaluated at a few points, exactly as a
capture of definite sizes would count them, and the integer polynomials through those points are
checked at others: what is returned holds for every size in its range, or nothing is.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import sympy
import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram, ShapesCollection
from torch.utils._pytree import tree_leaves

from fxpart.capture.export import export_program
from fxpart.capture.flops import FlopCounter
from fxpart.capture.from_export import op_graph
from fxpart.capture.joint import JointProgram, StepOptions, joint_programs
from fxpart.capture.sizes import Sizes
from fxpart.capture.symbolic_range import (
    Ranges,
    guards_that_fail,
    ranges_of,
    symbols_of,
    tightened,
)
from fxpart.errors import CaptureError, SpecError
from fxpart.graph import IntArray, OpGraph
from fxpart.phases import check_phase
from fxpart.symbolic.dims import SymbolicDim
from fxpart.symbolic.fit import DEGREE, Point, fitted, grid
from fxpart.symbolic.graph import OF_OPERATORS, OF_VALUES, SymbolicGraph

__all__ = ["SymbolicProgram", "symbolic_graph", "symbolic_program"]

_USUAL = StepOptions()
_FAR = 64
"""A size that is checked beside the smallest, where the range has it."""


@dataclass(frozen=True, eq=False, slots=True)
class SymbolicProgram:
    """A program that was captured with symbolic sizes, before it is made into arrays."""

    program: ExportedProgram
    """The model, or the training step, its sizes expressions of torch's own symbols."""
    step: JointProgram | None
    """The training step, where one was captured."""
    torch_symbols: Mapping[str, sympy.Symbol]
    """By our name of a symbol, torch's."""
    ranges: Ranges
    """By our name of a symbol, the smallest and largest value that the capture holds for."""
    captured_at: tuple[int, ...]
    """The value of each symbol, in the order of `torch_symbols`, in the example inputs."""

    def arrays(self, point: Point, counter: FlopCounter | None = None) -> OpGraph:
        """Return the graph at a value for each symbol.

        Raises:
            CaptureError: when a condition that the capture took for granted does not hold there.

        """
        numbers = dict(zip(self.torch_symbols.values(), point, strict=True))
        failing = guards_that_fail(self.program, numbers)
        if failing:
            at = ", ".join(f"{n}={v}" for n, v in zip(self.torch_symbols, point, strict=True))
            raise CaptureError(
                f"the model does something else at {at}: {failing[0]} does not hold; set"
                " capture.symbolic=none"
            )
        graph = op_graph(self.program, Sizes(numbers), counter)
        return graph if self.step is None else self.step.arrays(graph)


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
    """Return the graph of `module`, or of a training step, as polynomials of its input sizes.

    See `symbolic_program` for what it takes. `SymbolicGraph.value_batch_dim` is -1 throughout.

    Raises:
        SpecError: for no `dims`, or some that the example inputs do not have.
        CaptureError: for a module that cannot be captured at all, or not with these sizes
            symbolic, and for a size that is no polynomial of them.

    """
    found = symbolic_program(
        module, args, kwargs, dims=dims, phase=phase, options=options, ranges=ranges
    )
    return _fitted_graph(found)


def symbolic_program(
    module: nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    dims: Sequence[SymbolicDim] = (),
    phase: str = "inference",
    options: StepOptions = _USUAL,
    ranges: Ranges | None = None,
) -> SymbolicProgram:
    """Return `module`, or a training step of it, captured once for any sizes of its inputs.

    Args:
        module: what is captured, in the mode (train or eval) that it is in.
        args: example inputs by position. Give symbolic sizes of 2 or more: of 1, torch would take
            for granted that they are 1.
        kwargs: example inputs by name.
        dims: which dimensions are symbolic; symbols are numbered in this order.
        phase: ``inference`` or ``training``.
        options: how a training step is run.
        ranges: the smallest and largest value of each symbol, from 1 without limit where not said.
            Where the model allows less, the result does.

    Raises:
        SpecError: for no `dims`, or some that the example inputs do not have.
        CaptureError: for a module that cannot be captured at all, or not with these sizes symbolic.

    """
    check_phase(phase)
    inputs = dict(kwargs or {})
    sizes = _example_sizes(tree_leaves((args, inputs)), dims)
    wanted = {name: (ranges or {}).get(name, (1, None)) for name in sizes}
    step, program = _captured(_Subject(module, args, inputs, phase, options), dims, wanted)
    places = {(d.leaf, d.dim): (d.symbol, d.factor, d.offset) for d in dims}
    forward = program if step is None else step.forward
    symbols = symbols_of(forward, places)
    held = ranges_of(wanted, forward, symbols)
    return SymbolicProgram(program, step, symbols, held, tuple(sizes.values()))


def _example_sizes(leaves: list[Any], dims: Sequence[SymbolicDim]) -> dict[str, int]:
    """Return the value of each symbol in the example inputs."""
    found: dict[str, int] = {}
    if not dims:
        raise SpecError("no dimension of the inputs is symbolic; name one, or capture as usual")
    for dim in dims:
        leaf = leaves[dim.leaf] if dim.leaf < len(leaves) else None
        if not isinstance(leaf, Tensor) or dim.dim >= leaf.dim():
            raise SpecError(f"input {dim.leaf} has no dimension {dim.dim}; there are {len(leaves)}")
        number, rest = divmod(int(leaf.shape[dim.dim]) - dim.offset, dim.factor)
        if rest or number < 2 or found.setdefault(dim.symbol, number) != number:
            raise SpecError(
                f"dimension {dim.dim} of input {dim.leaf} is {leaf.shape[dim.dim]} long, which is"
                f" not {dim.factor} * {dim.symbol} + {dim.offset} for the one {dim.symbol} of 2 or"
                " more that the inputs have"
            )
    return found


@dataclass(frozen=True, eq=False, slots=True)
class _Subject:
    """What is captured, and how."""

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    phase: str
    options: StepOptions

    def captured(self, shapes: ShapesCollection) -> tuple[JointProgram | None, ExportedProgram]:
        """Return the step, if one is wanted, and the program."""
        if self.phase == "inference":
            return None, export_program(self.module, self.args, self.kwargs, shapes)
        # For convolutions of 16 examples or more the CPU would choose another library, and the
        # trace would hold for one side of that alone.
        with torch.backends.nnpack.flags(enabled=False):
            step = joint_programs(self.module, self.args, self.kwargs, self.options, shapes)
        return step, step.program


def _captured(
    subject: _Subject, dims: Sequence[SymbolicDim], ranges: Ranges
) -> tuple[JointProgram | None, ExportedProgram]:
    """Return what was captured; `ranges` give way to what torch allows."""
    leaves = tree_leaves((subject.args, subject.kwargs))
    while True:
        try:
            return subject.captured(_shapes(leaves, dims, ranges))
        except CaptureError as error:
            # It narrows a range, or raises: that ends.
            ranges.update(tightened(ranges, error))


def _shapes(leaves: list[Any], dims: Sequence[SymbolicDim], ranges: Ranges) -> ShapesCollection:
    named = {
        name: Dim(name, min=low) if high is None else Dim(name, min=low, max=high)
        for name, (low, high) in ranges.items()
    }
    by_leaf: dict[int, dict[int, Any]] = {}
    for dim in dims:
        size = named[dim.symbol] if dim.factor == 1 else dim.factor * named[dim.symbol]
        size = size + dim.offset if dim.offset else size
        by_leaf.setdefault(dim.leaf, {})[dim.dim] = size
    shapes: ShapesCollection = ShapesCollection()  # type: ignore[no-untyped-call]
    for leaf, sizes in by_leaf.items():
        shapes[leaves[leaf]] = sizes
    return shapes


def _fitted_graph(found: SymbolicProgram) -> SymbolicGraph:
    """Return the polynomials of everything that grows, from the graph at several points."""
    start = [_start(*found.ranges[name], at=number) for name, number in _examples(found).items()]
    points = dict.fromkeys([*grid(start), found.captured_at, *_checks(found)])
    counter = FlopCounter()
    graph = found.arrays(found.captured_at, counter)
    at = {p: graph if p == found.captured_at else found.arrays(p, counter) for p in points}
    tables, exponents = {}, np.empty((0, 0), dtype=np.int64)
    for field in (*OF_OPERATORS, *OF_VALUES):
        names = graph.names if field in OF_OPERATORS else graph.value_names
        columns: dict[Point, IntArray] = {p: getattr(g, field) for p, g in at.items()}
        exponents, tables[field] = fitted(columns, start, field, names)
    used = np.any([table.any(axis=0) for table in tables.values()], axis=0)
    used |= ~exponents.any(axis=1)
    return SymbolicGraph(
        graph=graph,
        symbols=tuple(found.torch_symbols),
        captured_at=found.captured_at,
        exponents=exponents[used],
        coefficients={field: table[:, used] for field, table in tables.items()},
        value_batch_dim=np.full(graph.n_values, -1, dtype=np.int64),
        ranges=tuple(found.ranges.values()),
    )


def _examples(found: SymbolicProgram) -> dict[str, int]:
    return dict(zip(found.torch_symbols, found.captured_at, strict=True))


def _start(low: int, high: int | None, at: int) -> int:
    """Return the smallest of the values to fit at: the example's, where there is room above it."""
    if high is None or at + DEGREE <= high:
        return at
    if high - DEGREE >= low:
        return high - DEGREE
    raise CaptureError(
        f"a symbolic size that may only be {low} to {high} is none; set capture.symbolic=none"
    )


def _checks(found: SymbolicProgram) -> list[Point]:
    """Return points beside those that are fitted at: all at their least, and all far away."""
    least = tuple(low for low, _ in found.ranges.values())
    far = tuple(_FAR if top is None else min(top, _FAR) for _, top in found.ranges.values())
    return [least, far]
