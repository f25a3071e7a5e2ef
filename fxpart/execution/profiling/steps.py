"""`Step`: a call node of a program, with its signature and whether its result must be real."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.export import ExportedProgram
from torch.utils._pytree import tree_leaves, tree_map

from fxpart.capture.calls import REGIONS, body_of
from fxpart.core.graph import OpGraph
from fxpart.errors import SpecError
from fxpart.execution.profiling.valid_arguments import (
    changed_nodes,
    needs_validity,
    valid_arguments,
)
from fxpart.support.digest import stable_digest

__all__ = [
    "Step",
    "as_captured",
    "shapes_of",
    "signature",
    "steps_of",
    "valid_region_arguments",
]


_MOST_BOUND = 2**62
_SMALL_BYTES = 2**18
"""Limit on the bytes a small operator reads and writes: a fraction of a core's private cache."""


# Signatures.


def signature(node: fx.Node) -> str:
    """Return 64 hex digits, equal for calls expected to take equal time.

    They hash the target, the shape, strides and dtype of every tensor, and every other argument
    except devices; for a region, the same of all its calls.
    """
    return stable_digest(_call(node))


def _call(node: fx.Node) -> dict[str, object]:
    kwargs = {name: _described(argument) for name, argument in node.kwargs.items()}
    return {"target": str(node.target), "args": _described(node.args), "kwargs": kwargs}


def shapes_of(node: fx.Node) -> list[list[int]]:
    """Return the shapes of a call's operands, for human readers."""
    values = [operand.meta.get("val") for operand in node.all_input_nodes]
    return [[int(size) for size in value.shape] for value in values if isinstance(value, Tensor)]


def _described(argument: Any) -> object:  # noqa: ANN401 - any argument of a call
    if isinstance(argument, fx.Node) and argument.op == "get_attr":
        calls = body_of(argument).graph.nodes
        return [_call(call) for call in calls if call.op == "call_function"]
    if isinstance(argument, fx.Node):
        return _described(argument.meta.get("val"))
    if isinstance(argument, Tensor):
        shape, strided = list(map(int, argument.shape)), argument.layout is torch.strided
        layout = list(map(int, argument.stride())) if strided else str(argument.layout)
        return ["tensor", shape, layout, str(argument.dtype)]
    if isinstance(argument, list | tuple):
        return [_described(item) for item in argument]
    if isinstance(argument, torch.device):
        return "device"
    plain = argument is None or isinstance(argument, bool | int | str)
    return argument if plain else repr(argument)


# Regions: calls that run a graph under autocast, or with gradients on or off.


def _runnable_body(body: fx.GraphModule, device: torch.device) -> fx.GraphModule:
    """Return a copy of `body` that allocates its tensors on `device`.

    Checks of dtypes and devices are left out, since they only hold for the capture: autocast does
    not change dtypes on the meta device, but does where the region is run.
    """
    copied = copy.deepcopy(body)
    for part in copied.modules():
        if isinstance(part, fx.GraphModule):
            _move(part, device)
    return copied


def _move(part: fx.GraphModule, device: torch.device) -> None:
    def moved(argument: Any) -> Any:  # noqa: ANN401 - as torch types arguments
        return device if isinstance(argument, torch.device) else argument

    for node in list(part.graph.nodes):
        if node.op != "call_function":
            continue
        if node.target is torch.ops.aten._assert_tensor_metadata.default:
            part.graph.erase_node(node)
            continue
        node.args = fx.node.map_aggregate(node.args, moved)
        node.kwargs = fx.node.map_aggregate(node.kwargs, moved)
    part.recompile()


def _holds_validity(node: fx.Node) -> bool:
    """Return whether `node` is, or contains, an operator that rejects some values."""
    if node.target not in REGIONS:
        return callable(node.target) and needs_validity(node.target)
    bodies = [body_of(operand) for operand in node.all_input_nodes if operand.op == "get_attr"]
    return any(
        _holds_validity(call)
        for body in bodies
        for call in body.graph.nodes
        if call.op == "call_function"
    )


def valid_region_arguments(call: Callable[..., Any], args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the arguments of a region's call with every index among them made valid.

    The region is run once for this before it is timed. An index computed inside, even as a view of
    an operand, cannot be changed in a timed run, so all integer operands are reduced until no index
    is too large.
    """
    position = next(i for i, arg in enumerate(args) if isinstance(arg, fx.GraphModule))
    leading, body, operands = args[:position], args[position], list(args[position + 1 :])
    names = [node.name for node in body.graph.find_nodes(op="placeholder")]
    bound = _MOST_BOUND
    while bound > 0:
        trial = _ValidRun(body)
        call(*leading, trial.run, *operands)
        operands = [trial.changed.get(n, x) for n, x in zip(names, operands, strict=True)]
        if trial.bound is None:
            break
        bound = min(trial.bound, bound // 2)
        operands = [
            x.remainder(max(1, bound)) if isinstance(x, Tensor) and _is_integer(x) else x
            for x in operands
        ]
    return (*leading, body, *operands)


def _is_integer(tensor: Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool)


class _ValidRun(fx.Interpreter):
    """Interpreter that makes arguments of a body valid, and records changed ones."""

    def __init__(self, body: fx.GraphModule) -> None:
        super().__init__(body)
        self.changed: dict[str, Tensor] = {}
        """New values of the body's inputs, by name."""
        self.bound: int | None = None
        """Smallest bound violated by an index that the body computes."""

    def run_node(self, n: fx.Node) -> Any:  # noqa: ANN401 - as in the base class
        call = n.target
        if n.op != "call_function" or not callable(call):
            return super().run_node(n)
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        if call in REGIONS:
            valid: tuple[Any, Any] = valid_region_arguments(call, args), kwargs
        else:
            valid = valid_arguments(call, args, dict(kwargs))
        for node, value in changed_nodes((n.args, n.kwargs), (args, kwargs), valid):
            self.env[node] = value
            if node.op == "placeholder":
                self.changed[node.name] = value
            elif _is_integer(value) and value.numel():
                bound = int(value.max()) + 1
                self.bound = bound if self.bound is None else min(self.bound, bound)
        return call(*valid[0], **valid[1])


def as_captured(result: Any, like: Any) -> Any:  # noqa: ANN401 - a tensor or a tuple of them
    """Return the result of a region in the captured dtypes expected by later calls."""
    return tree_map(
        lambda got, expected: got.to(expected.dtype) if isinstance(got, Tensor) else got,
        result,
        like,
    )


# Steps.


@dataclass(frozen=True, eq=False, slots=True)
class Step:
    """One operator."""

    node: fx.Node
    args: tuple[Any, ...]
    """Nodes, lists of nodes, constants and graphs of regions, on the measured device."""
    kwargs: dict[str, Any]
    signature: str
    is_exact: bool
    """Whether its result must be real. Made-up numbers do not suffice where they must be
    consistent, such as group sizes with the number of rows: integer results, and results that
    depend on integers and masks alone, are always computed."""
    is_small: bool
    """Whether running it takes no longer than fabricating its result."""
    is_region: bool
    """Whether it runs a graph in its own mode."""
    needs_validity: bool
    """Whether it rejects some argument values."""


def steps_of(program: ExportedProgram, graph: OpGraph, device: torch.device) -> list[Step]:
    """Return the operators of `program` in order, for `device`.

    Raises:
        SpecError: if `graph` is not the graph of `program`, or sizes are symbolic.

    """
    calls = [node for node in program.graph.nodes if node.op == "call_function"]
    if tuple(node.name for node in calls) != graph.names:
        raise SpecError(
            f"the graph ({graph.n_ops} operators) is not that of the program ({len(calls)} calls);"
            " give op_graph(program), or the two that were captured together"
        )
    exact, steps = _exact_inputs(program), []
    for node in calls:
        if _is_exact(node, exact):
            exact.add(node)
        args = tuple(_on_device(argument, device) for argument in node.args)
        kwargs = {name: _on_device(argument, device) for name, argument in node.kwargs.items()}
        steps.append(
            Step(
                node,
                args,
                kwargs,
                signature(node),
                is_exact=node in exact,
                is_small=_is_small(node),
                is_region=node.target in REGIONS,
                needs_validity=_holds_validity(node),
            )
        )
    return steps


def _is_small(node: fx.Node) -> bool:
    touched = [node.meta.get("val"), *(x.meta.get("val") for x in node.all_input_nodes)]
    tensors = [leaf for leaf in tree_leaves(touched) if isinstance(leaf, Tensor)]
    return sum(t.numel() * t.element_size() for t in tensors) <= _SMALL_BYTES


def _on_device(argument: Any, device: torch.device) -> Any:  # noqa: ANN401 - as torch types it
    if isinstance(argument, fx.Node) and argument.op == "get_attr":
        return _runnable_body(body_of(argument), device)
    if isinstance(argument, list):
        return [_on_device(item, device) for item in argument]
    return device if isinstance(argument, torch.device) else argument


def _exact_inputs(program: ExportedProgram) -> set[fx.Node]:
    """Return the inputs that are integers or masks; refuse symbolic sizes."""
    exact = set()
    for node in program.graph.find_nodes(op="placeholder"):
        value = node.meta.get("val")
        if not isinstance(value, Tensor):
            continue
        if any(isinstance(size, torch.SymInt) for size in value.shape):
            raise SpecError(
                f"input {node.name} has a size that is a symbol, and only real sizes can be"
                " measured; export without dynamic shapes"
            )
        if not (value.is_floating_point() or value.is_complex()):
            exact.add(node)
    return exact


def _is_exact(node: fx.Node, exact: set[fx.Node]) -> bool:
    """Return whether a result must be real; masks may be random unless their operands are exact."""
    results = [leaf for leaf in tree_leaves(node.meta.get("val")) if isinstance(leaf, Tensor)]
    operands = [x for x in node.all_input_nodes if x.meta.get("val") is not None]
    return any(map(_is_integer, results)) or all(operand in exact for operand in operands)
