"""`symbolic_program`: capture a model, or a training step, once for any input sizes."""

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import Tensor, fx, nn, ops
from torch.export import Dim, ExportedProgram, ShapesCollection
from torch.utils._pytree import tree_leaves

from fxpart.capture.call_costs import CallCounter
from fxpart.capture.inference.export import export_program
from fxpart.capture.inference.from_export import op_graph, temporary_bytes
from fxpart.capture.sizes import Sizes
from fxpart.capture.symbolic.dims import SymbolicDim
from fxpart.capture.symbolic.polynomials import Point
from fxpart.capture.symbolic.symbol_range import (
    Ranges,
    guards_that_fail,
    ranges_of,
    symbols_of,
    tightened,
)
from fxpart.capture.symbolic.whole_slices import drop_whole_slices
from fxpart.capture.training.interpolation import symbolic_interpolation
from fxpart.capture.training.joint import JointProgram, StepOptions, joint_programs
from fxpart.capture.training.joint_labels import FORWARD
from fxpart.core.graph import OpGraph
from fxpart.core.phases import check_phase
from fxpart.errors import CaptureError, SpecError

__all__ = ["SymbolicProgram", "exact_from", "symbolic_program"]


_ATEN = ops.aten
_COPIES = (_ATEN.contiguous.default, _ATEN.clone.default)
_SUM = _ATEN.sum.dim_IntList
_USUAL = StepOptions()


# Operators that are absent from a capture with a size of 1.
#
# A transposed matrix is not contiguous unless one of its dimensions is 1, when `contiguous` copies
# nothing. A gradient is not summed over a dimension of 1. A symbolic program does both at every
# size, so it has a few more operators at 1. A broadcast product copies its operands but for 1.


def exact_from(
    program: ExportedProgram, symbols: Mapping[str, sympy.Symbol], example: Mapping[str, int]
) -> tuple[int, ...]:
    """Return, for each symbol, 2 if a size of 1 makes operators of `program` redundant, else 1.

    Args:
        program: a captured model or training step.
        symbols: torch's symbol for each of ours.
        example: the value of each symbol in the example inputs.

    """
    nodes = [
        node
        for body in program.graph_module.modules()
        if isinstance(body, fx.GraphModule)
        for node in body.graph.nodes
        if node.op == "call_function" and _may_be_needless(node)
    ]
    usual = Sizes({symbols[name]: number for name, number in example.items()})
    counter = CallCounter()
    calls = (node for node in program.graph.nodes if node.op == "call_function")
    calls = (node for node in calls if not usual.is_size(node))
    copying = [node for node in calls if temporary_bytes(node, usual, counter)]
    lowest: list[int] = []
    for name in example:
        sizes_at_one = Sizes({symbols[n]: 1 if n == name else v for n, v in example.items()})
        saved = any(
            _is_needed(node, usual) and not _is_needed(node, sizes_at_one) for node in nodes
        ) or not all(temporary_bytes(node, sizes_at_one, counter) for node in copying)
        lowest.append(2 if saved else 1)
    return tuple(lowest)


def _may_be_needless(node: fx.Node) -> bool:
    if node.target is _ATEN.clone.default:
        # Without a format it is a copy requested by the model.
        return node.kwargs.get("memory_format") is not None
    if node.target is _SUM:
        # Only in the backward, since the model's own sums stay. A sum that also drops the dimension
        # stays too: its result has another rank than the broadcast operand.
        is_lost = any(user.target is _ATEN.view.default for user in node.users)
        return node.meta.get(FORWARD) is not None and not is_lost
    return node.target in (*_COPIES, _ATEN.reshape.default)


def _is_needed(node: fx.Node, sizes: Sizes) -> bool:
    source = node.args[0]
    source_value = sizes.of(source) if isinstance(source, fx.Node) else None
    if not isinstance(source_value, Tensor):
        return False
    if node.target is _SUM:
        return bool(source_value.numel() != sizes.of(node).numel())
    if node.target is _ATEN.reshape.default:
        return not _is_view(source_value, sizes.of(node))
    reshaped = [user for user in node.users if user.target is _ATEN._unsafe_view.default]
    if reshaped and any(_is_view(source_value, sizes.of(user)) for user in reshaped):
        return False
    return not source_value.is_contiguous()


def _is_view(before: Tensor, after: Tensor) -> bool:
    """Return whether `before` can be viewed in the shape of `after`."""
    try:
        before.view(after.shape)
    except RuntimeError:
        return False
    return True


# Capture.


@contextmanager
def _symbolic_lengths(module: nn.Module) -> Iterator[None]:
    """Let `len` of a tensor be its symbolic size in the file that defines the forward of `module`.

    Python's `len` returns a number, which fixes the batch: models that compare images with texts
    number their rows by ``torch.arange(len(logits))``. Not thread-safe.
    """
    names = getattr(inspect.unwrap(type(module).forward), "__globals__", {})
    if "len" in names:
        yield
        return
    names["len"] = lambda sized: sized.shape[0] if isinstance(sized, Tensor) else len(sized)
    try:
        yield
    finally:
        del names["len"]


@dataclass(frozen=True, eq=False, slots=True)
class SymbolicProgram:
    """A program captured with symbolic sizes, without its arrays."""

    program: ExportedProgram
    """The model, or the training step, with sizes as expressions of torch's symbols."""
    step: JointProgram | None
    """The training step, if one was captured."""
    torch_symbols: Mapping[str, sympy.Symbol]
    """Torch's symbol for each of ours, by name."""
    ranges: Ranges
    """The smallest and largest valid value of each symbol, by our name."""
    captured_at: tuple[int, ...]
    """The value of each symbol in the example inputs, in the order of `torch_symbols`."""
    exact_from: tuple[int, ...]
    """See `SymbolicGraph`."""

    def operators(self, point: Point, counter: CallCounter | None = None) -> OpGraph:
        """Return the operators and values at `point`, one value per symbol in order.

        Raises:
            CaptureError: if an assumption of the capture does not hold there.

        """
        numbers = dict(zip(self.torch_symbols.values(), point, strict=True))
        failing = guards_that_fail(self.program, numbers)
        if failing:
            sizes_text = ", ".join(
                f"{n}={v}" for n, v in zip(self.torch_symbols, point, strict=True)
            )
            raise CaptureError(
                f"the model takes another branch at {sizes_text}: {failing[0]} does not hold; set "
                "capture.symbolic=none"
            )
        return op_graph(self.program, Sizes(numbers), counter)

    def whole(self, graph: OpGraph) -> OpGraph:
        """Return `graph`, one of `operators`, with a training step's partners and gradients."""
        return graph if self.step is None else self.step.arrays(graph)


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
    """Return `module`, or its training step, captured once for any input sizes.

    Args:
        module: the module to capture, in its current mode (train or eval).
        args: example inputs by position. Symbolic sizes must be 2 or more, since torch would assume
            that a size of 1 is always 1.
        kwargs: example inputs by name.
        dims: symbolic dimensions; symbols are numbered in this order.
        phase: ``inference`` or ``training``.
        options: options of the training step.
        ranges: the smallest and largest value of each symbol; by default 1 and unlimited. Narrowed
            if the model allows less.

    Raises:
        SpecError: if `dims` is empty, or names dimensions that the example inputs lack.
        CaptureError: if the module cannot be captured with these sizes symbolic.

    """
    check_phase(phase)
    inputs = dict(kwargs or {})
    sizes = _example_sizes(tree_leaves((args, inputs)), dims)
    requested = {name: (ranges or {}).get(name, (1, None)) for name in sizes}
    subject = _Subject(module, args, inputs, phase, options)
    step, program, allowed = _captured(subject, dims, requested)
    shapes = {(d.leaf, d.dim): (d.symbol, d.factor, d.offset) for d in dims}
    forward = program if step is None else step.forward
    symbols = symbols_of(forward, shapes)
    return SymbolicProgram(
        program,
        step,
        symbols,
        ranges_of(allowed, forward, symbols),
        tuple(sizes.values()),
        exact_from(program, symbols, sizes),
    )


def _example_sizes(leaves: list[Any], dims: Sequence[SymbolicDim]) -> dict[str, int]:
    """Return the value of each symbol in the example inputs."""
    sizes: dict[str, int] = {}
    if not dims:
        raise SpecError("no dimension of the inputs is symbolic; name one, or capture as usual")
    for dim in dims:
        leaf = leaves[dim.leaf] if dim.leaf < len(leaves) else None
        if not isinstance(leaf, Tensor) or dim.dim >= leaf.dim():
            raise SpecError(f"input {dim.leaf} has no dimension {dim.dim}; there are {len(leaves)}")
        number, remainder = divmod(int(leaf.shape[dim.dim]) - dim.offset, dim.factor)
        if remainder or number < 2 or sizes.setdefault(dim.symbol, number) != number:
            raise SpecError(
                f"dimension {dim.dim} of input {dim.leaf} is {leaf.shape[dim.dim]} long, which is"
                f" not {dim.factor} * {dim.symbol} + {dim.offset} for the one {dim.symbol} of 2 or"
                " more that the inputs have"
            )
    return sizes


@dataclass(frozen=True, eq=False, slots=True)
class _Subject:
    """A module to capture, with its inputs and options."""

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    phase: str
    options: StepOptions

    def captured(self, shapes: ShapesCollection) -> tuple[JointProgram | None, ExportedProgram]:
        """Return the step, in training, and the program."""
        with _symbolic_lengths(self.module):
            return self._captured(shapes)

    def _captured(self, shapes: ShapesCollection) -> tuple[JointProgram | None, ExportedProgram]:
        if self.phase != "training":
            # Torch remembers what operators return; with symbolic sizes that takes longer than
            # finding it out again.
            with torch._dynamo.config.patch(fake_tensor_cache_enabled=False):
                program = export_program(self.module, self.args, self.kwargs, shapes)
            drop_whole_slices(program)
            return None, program
        # For convolutions of 16 examples or more the CPU would choose another library, so the
        # trace would only hold on one side of that size.
        with torch.backends.nnpack.flags(enabled=False), symbolic_interpolation():
            step = joint_programs(self.module, self.args, self.kwargs, self.options, shapes)
        return step, step.program


def _captured(
    subject: _Subject, dims: Sequence[SymbolicDim], ranges: Ranges
) -> tuple[JointProgram | None, ExportedProgram, Ranges]:
    """Return the step and the program, and `ranges` as narrowed by torch."""
    leaves = tree_leaves((subject.args, subject.kwargs))
    while True:
        try:
            return *subject.captured(_shapes(leaves, dims, ranges)), ranges
        except CaptureError as error:
            # Terminates, since each round narrows a range or raises.
            ranges = tightened(ranges, error)


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
