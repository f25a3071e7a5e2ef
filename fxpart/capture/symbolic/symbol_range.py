"""Ranges of symbolic sizes: as requested, as found by `torch.export`, and as assumed by a trace.

Models often do not allow every size from 1, as position tables are finite.
"""

import re
from collections.abc import Mapping

import sympy
import torch
from torch import SymInt, Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.export import ExportedProgram

from fxpart.capture.sizes import Sizes, solved
from fxpart.errors import CaptureError

__all__ = ["Ranges", "guards_that_fail", "ranges_of", "symbols_of", "tightened"]

Ranges = dict[str, tuple[int, int | None]]
"""The smallest and largest value of each symbol; None means unlimited."""

_FIX = re.compile(r"^\s*(\w+) = (.*)$", re.MULTILINE)
_LIMIT = re.compile(r"\b(min|max)=(\d+)")


def tightened(ranges: Ranges, error: CaptureError) -> Ranges:
    """Return `ranges` narrowed as suggested by `torch.export` in its error.

    Raises:
        CaptureError: if the error has another reason, or the model fixes a symbol to a number or to
            another symbol.

    """
    text, cause = str(error), error.__cause__
    while cause is not None:
        text, cause = f"{text}\n{cause}", cause.__cause__
    suggested = text.partition("Suggested fixes:")[2]
    fixes = dict(_FIX.findall(suggested))
    relevant_fixes = {name: fix for name, fix in fixes.items() if name in ranges}
    if not relevant_fixes:
        raise _refusal(error, text) from error
    narrow = dict(ranges)
    for name, fix in relevant_fixes.items():
        if not fix.startswith("Dim("):
            raise CaptureError(
                f"{name} cannot be symbolic: the model is valid for {name} = {fix} only; set "
                "capture.symbolic=none"
            ) from error
        limits = {which: int(number) for which, number in _LIMIT.findall(fix)}
        low, high = ranges[name]
        tops = [top for top in (high, limits.get("max")) if top is not None]
        narrow[name] = (max(low, limits.get("min", low)), min(tops, default=None))
    if narrow == ranges:
        raise _refusal(error, text) from error
    return narrow


def _refusal(error: CaptureError, text: str) -> CaptureError:
    if "Constraints violated" not in text:
        return error
    return CaptureError(f"{error}; set capture.symbolic=none, or fewer sizes symbolic")


def symbols_of(
    program: ExportedProgram, shapes: Mapping[tuple[int, int], tuple[str, int, int]]
) -> dict[str, sympy.Symbol]:
    """Return torch's symbol for each of ours.

    `shapes` has the symbol, factor and offset of each symbolic size, by input and dimension.

    Raises:
        CaptureError: if the program fixed a size, or unified two symbols.

    """
    nodes = {node.name: node for node in program.graph.find_nodes(op="placeholder")}
    inputs = [nodes.get(str(name)) for name in program.graph_signature.user_inputs]
    symbols: dict[str, sympy.Symbol] = {}
    for (leaf, dim), (name, factor, offset) in shapes.items():
        node = inputs[leaf]
        value = None if node is None else node.meta.get("val")
        size = value.shape[dim] if isinstance(value, Tensor) else None
        # The expression is `factor * x + offset` if its solution for `factor + offset` is 1.
        symbol: dict[sympy.Symbol, int] = (
            solved(size.node.expr, factor + offset) if isinstance(size, SymInt) else {}
        )
        if not symbol or list(symbol.values()) != [1]:
            raise CaptureError(
                f"{name} cannot be symbolic: the model fixes dimension {dim} of input {leaf} to"
                f" {size}; set capture.symbolic=none"
            )
        symbols[name] = next(iter(symbol))
    if len(set(symbols.values())) < len(symbols):
        raise CaptureError(
            f"{' and '.join(symbols)} cannot both be symbolic: the model is valid only if they are "
            "equal; make one of them symbolic"
        )
    return symbols


def ranges_of(
    requested: Ranges, program: ExportedProgram, symbols: Mapping[str, sympy.Symbol]
) -> Ranges:
    """Return the range of each symbol in which the program and its trace are valid."""
    environment = _environment(program)
    ranges: Ranges = {}
    for name, (low, high) in requested.items():
        torch_ranges = [program.range_constraints.get(symbols[name])]
        if environment is not None:
            torch_ranges.append(environment.var_to_range.get(symbols[name]))
        tops = [int(r.upper) for r in torch_ranges if r is not None and r.upper.is_Integer]
        lows = [int(r.lower) for r in torch_ranges if r is not None and r.lower.is_Integer]
        # Torch assumes sizes of 2 or more while tracing, yet accepts 1 for the result.
        lowest = max([low, *(bound for bound in lows if bound > 2)])
        ranges[name] = (lowest, min([*tops, *([high] if high is not None else [])], default=None))
    return _with_statistics(ranges, program, symbols)


def _with_statistics(
    ranges: Ranges, program: ExportedProgram, symbols: Mapping[str, sympy.Symbol]
) -> Ranges:
    """Return `ranges` without sizes of 1 that leave a batch normalization one number per channel.

    Torch refuses those, since one number has no variance. If several symbols could avoid it, the
    last one is restricted.
    """
    norms = [
        node
        for body in program.graph_module.modules()
        if isinstance(body, fx.GraphModule)
        for node in body.graph.nodes
        if _takes_statistics(node)
    ]

    def is_refused(point: Mapping[str, int]) -> bool:
        sizes = Sizes({symbols[name]: number for name, number in point.items()})
        inputs = [sizes.of(node.args[0]) for node in norms]
        return any(x.dim() > 1 and x.numel() == x.shape[1] for x in inputs)

    ranges = dict(ranges)
    for name in reversed(list(ranges)):
        lowest = {name: low for name, (low, _) in ranges.items()}
        if lowest[name] == 1 and is_refused(lowest) and not is_refused(lowest | {name: 2}):
            ranges[name] = (2, ranges[name][1])
    return ranges


def _takes_statistics(node: fx.Node) -> bool:
    name = str(node.target)
    if node.op != "call_function" or "batch_norm" not in name or "backward" in name:
        return False
    schema = getattr(node.target, "_schema", None)
    names = [argument.name for argument in schema.arguments] if schema else []
    return bool({**dict(zip(names, node.args, strict=False)), **node.kwargs}.get("training", True))


def guards_that_fail(program: ExportedProgram, numbers: Mapping[sympy.Symbol, int]) -> list[str]:
    """Return the assumptions of the trace that fail for `numbers`."""
    environment = _environment(program)
    if environment is None:
        return []
    failing = []
    for guard in environment.guards:
        condition = environment.replace(guard.expr).xreplace(dict(numbers))
        if condition == sympy.false:
            failing.append(str(guard.expr))
    return failing


def _environment(
    program: ExportedProgram,
) -> "torch.fx.experimental.symbolic_shapes.ShapeEnv | None":
    values = (node.meta.get("val") for node in program.graph.find_nodes(op="placeholder"))
    mode = next((value.fake_mode for value in values if isinstance(value, FakeTensor)), None)
    return None if mode is None else mode.shape_env
