"""In what range a symbolic size may be: as asked, as `torch.export` finds, as a trace fixes it.

What a model allows is often less than any size from 1: a table of positions has an end.
"""

import re
from collections.abc import Mapping

import sympy
import torch
from torch import SymInt, Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.export import ExportedProgram

from fxpart.capture.sizes import solved
from fxpart.errors import CaptureError

__all__ = ["Ranges", "guards_that_fail", "ranges_of", "symbols_of", "tightened"]

Ranges = dict[str, tuple[int, int | None]]
"""The smallest and largest value of each symbol; None is no limit."""

_FIX = re.compile(r"^\s*(\w+) = (.*)$", re.MULTILINE)
_LIMIT = re.compile(r"\b(min|max)=(\d+)")


def tightened(ranges: Ranges, error: CaptureError) -> Ranges:
    """Return `ranges` narrowed as `torch.export` suggests where it refuses them.

    Raises:
        CaptureError: when the refusal is about something else, or the model fixes a symbol to a
            number or to another one.

    """
    text, cause = str(error), error.__cause__
    while cause is not None:
        text, cause = f"{text}\n{cause}", cause.__cause__
    suggested = text.partition("Suggested fixes:")[2]
    fixes = dict(_FIX.findall(suggested))
    known = {name: fix for name, fix in fixes.items() if name in ranges}
    if not known:
        raise _refusal(error, text) from error
    narrow = dict(ranges)
    for name, fix in known.items():
        if not fix.startswith("Dim("):
            raise CaptureError(
                f"{name} cannot be symbolic: the model holds for {name} = {fix} alone; set"
                " capture.symbolic=none"
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

    `shapes` has for the place (input, dimension) of each symbolic size its symbol, factor and
    offset.

    Raises:
        CaptureError: when the program has fixed a size, or joined two symbols.

    """
    nodes = {node.name: node for node in program.graph.find_nodes(op="placeholder")}
    inputs = [nodes.get(str(name)) for name in program.graph_signature.user_inputs]
    found: dict[str, sympy.Symbol] = {}
    for (leaf, dim), (name, factor, offset) in shapes.items():
        node = inputs[leaf]
        value = None if node is None else node.meta.get("val")
        size = value.shape[dim] if isinstance(value, Tensor) else None
        # Of x and `factor * x + offset` only x itself solves the expression for that number.
        symbol: dict[sympy.Symbol, int] = (
            solved(size.node.expr, factor + offset) if isinstance(size, SymInt) else {}
        )
        if not symbol or list(symbol.values()) != [1]:
            raise CaptureError(
                f"{name} cannot be symbolic: the model fixes dimension {dim} of input {leaf} to"
                f" {size}; set capture.symbolic=none"
            )
        found[name] = next(iter(symbol))
    if len(set(found.values())) < len(found):
        raise CaptureError(
            f"{' and '.join(found)} cannot both be symbolic: the model holds where they are equal"
            " alone; make one of them symbolic"
        )
    return found


def ranges_of(
    asked: Ranges, program: ExportedProgram, symbols: Mapping[str, sympy.Symbol]
) -> Ranges:
    """Return the range of each symbol in which the program, and what was traced of it, holds."""
    environment = _environment(program)
    found: Ranges = {}
    for name, (low, high) in asked.items():
        known = [program.range_constraints.get(symbols[name])]
        if environment is not None:
            known.append(environment.var_to_range.get(symbols[name]))
        tops = [int(r.upper) for r in known if r is not None and r.upper.is_Integer]
        lows = [int(r.lower) for r in known if r is not None and r.lower.is_Integer]
        # Torch takes every size to be 2 or more while it traces, and lets the result hold for 1.
        least = max([low, *(bound for bound in lows if bound > 2)])
        found[name] = (least, min([*tops, *([high] if high is not None else [])], default=None))
    return found


def guards_that_fail(program: ExportedProgram, numbers: Mapping[sympy.Symbol, int]) -> list[str]:
    """Return the conditions that tracing took for granted and that do not hold for `numbers`."""
    environment = _environment(program)
    if environment is None:
        return []
    failing = []
    for guard in environment.guards:
        held = environment.replace(guard.expr).xreplace(dict(numbers))
        if held == sympy.false:
            failing.append(str(guard.expr))
    return failing


def _environment(
    program: ExportedProgram,
) -> "torch.fx.experimental.symbolic_shapes.ShapeEnv | None":
    values = (node.meta.get("val") for node in program.graph.find_nodes(op="placeholder"))
    mode = next((value.fake_mode for value in values if isinstance(value, FakeTensor)), None)
    return None if mode is None else mode.shape_env
