"""A program's call nodes as steps: what each calls, and whether its result must be a real one."""

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
from fxpart.execution.profiling.valid_arguments import bent_nodes, needs_validity, valid_arguments
from fxpart.support.digest import stable_digest

__all__ = [
    "Step",
    "as_captured",
    "holds_validity",
    "runnable_body",
    "shapes_of",
    "signature",
    "steps_of",
    "valid_region_arguments",
]


# What decides an operator's time: what it calls, on tensors of which shapes, how.


def signature(node: fx.Node) -> str:
    """Return 64 hex digits that calls have in common which take the same time.

    Target, shape, strides and dtype of every tensor, and every other argument, except devices; of a
    region the same of all its calls.
    """
    return stable_digest(_call(node))


def _call(node: fx.Node) -> dict[str, object]:
    kwargs = {name: _shown(given) for name, given in node.kwargs.items()}
    return {"target": str(node.target), "args": _shown(node.args), "kwargs": kwargs}


def shapes_of(node: fx.Node) -> list[list[int]]:
    """Return the shapes of the tensors that a call reads, for people to look at."""
    values = [given.meta.get("val") for given in node.all_input_nodes]
    return [[int(size) for size in value.shape] for value in values if isinstance(value, Tensor)]


def _shown(given: Any) -> object:  # noqa: ANN401 - anything that a call may be given
    if isinstance(given, fx.Node) and given.op == "get_attr":
        calls = body_of(given).graph.nodes
        return [_call(call) for call in calls if call.op == "call_function"]
    if isinstance(given, fx.Node):
        return _shown(given.meta.get("val"))
    if isinstance(given, Tensor):
        return ["tensor", list(map(int, given.shape)), _strides(given), str(given.dtype)]
    if isinstance(given, list | tuple):
        return [_shown(item) for item in given]
    if isinstance(given, torch.device):
        return "device"
    return given if given is None or isinstance(given, bool | int | str) else repr(given)


def _strides(tensor: Tensor) -> list[int] | str:
    if tensor.layout is not torch.strided:
        return str(tensor.layout)
    return [int(stride) for stride in tensor.stride()]


# Regions: calls of a graph of its own, run under autocast or with gradients on or off.

_MOST_BOUND = 2**62


def runnable_body(body: fx.GraphModule, device: torch.device) -> fx.GraphModule:
    """Return a copy of `body` that makes its tensors on `device`.

    Checks of dtypes and devices are left out: they say what was captured, and autocast on the meta
    device changes no dtypes as it does where the region is run.
    """
    made = copy.deepcopy(body)
    for part in made.modules():
        if isinstance(part, fx.GraphModule):
            _move(part, device)
    return made


def _move(part: fx.GraphModule, device: torch.device) -> None:
    def moved(given: Any) -> Any:  # noqa: ANN401 - as torch types arguments
        return device if isinstance(given, torch.device) else given

    for node in list(part.graph.nodes):
        if node.op != "call_function":
            continue
        if node.target is torch.ops.aten._assert_tensor_metadata.default:
            part.graph.erase_node(node)
            continue
        node.args = fx.node.map_aggregate(node.args, moved)
        node.kwargs = fx.node.map_aggregate(node.kwargs, moved)
    part.recompile()


def holds_validity(node: fx.Node) -> bool:
    """Return whether `node` is an operator, or holds one, that refuses some values."""
    if node.target not in REGIONS:
        return callable(node.target) and needs_validity(node.target)
    bodies = [body_of(given) for given in node.all_input_nodes if given.op == "get_attr"]
    return any(
        holds_validity(call)
        for body in bodies
        for call in body.graph.nodes
        if call.op == "call_function"
    )


def valid_region_arguments(call: Callable[..., Any], args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the arguments of a region's call with every index among them made valid.

    The region is run for that, before it is timed. An index that it computes, be it a mere view of
    what it is given, cannot be bent in a run that is timed: all whole numbers that are given are
    made smaller until none is too large.
    """
    place = next(i for i, given in enumerate(args) if isinstance(given, fx.GraphModule))
    before, body, operands = args[:place], args[place], list(args[place + 1 :])
    names = [node.name for node in body.graph.find_nodes(op="placeholder")]
    bound = _MOST_BOUND
    while bound > 0:
        bending = _Bending(body)
        call(*before, bending.run, *operands)
        operands = [bending.bent.get(n, given) for n, given in zip(names, operands, strict=True)]
        if bending.bound is None:
            break
        bound = min(bending.bound, bound // 2)
        operands = [_below(given, max(1, bound)) for given in operands]
    return (*before, body, *operands)


def _below(given: Any, bound: int) -> Any:  # noqa: ANN401 - any operand
    return given.remainder(bound) if isinstance(given, Tensor) and _is_whole(given) else given


def _is_whole(tensor: Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool)


class _Bending(fx.Interpreter):
    """Runs a body with arguments made valid, and notes which had to be."""

    def __init__(self, body: fx.GraphModule) -> None:
        super().__init__(body)
        self.bent: dict[str, Tensor] = {}
        """What inputs of the body are now."""
        self.bound: int | None = None
        """What the indices that the body computed should have been below."""

    def run_node(self, n: fx.Node) -> Any:  # noqa: ANN401 - as in the base class
        call = n.target
        if n.op != "call_function" or not callable(call):
            return super().run_node(n)
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        if call in REGIONS:
            valid: tuple[Any, Any] = valid_region_arguments(call, args), kwargs
        else:
            valid = valid_arguments(call, args, dict(kwargs))
        for node, value in bent_nodes((n.args, n.kwargs), (args, kwargs), valid):
            self.env[node] = value
            if node.op == "placeholder":
                self.bent[node.name] = value
            elif _is_whole(value) and value.numel():
                most = int(value.max()) + 1
                self.bound = most if self.bound is None else min(self.bound, most)
        return call(*valid[0], **valid[1])


def as_captured(result: Any, like: Any) -> Any:  # noqa: ANN401 - a tensor or a tuple of them
    """Return the result of a region in the dtypes that were captured: later calls expect these."""
    return tree_map(
        lambda got, expected: got.to(expected.dtype) if isinstance(got, Tensor) else got,
        result,
        like,
    )


_SMALL_BYTES = 2**18
"""Of all that an operator reads and writes: a fraction of a processor's own cache."""


@dataclass(frozen=True, eq=False, slots=True)
class Step:
    """One operator."""

    node: fx.Node
    args: tuple[Any, ...]
    """What it is called with: nodes, lists of nodes, constants, and graphs of regions; devices are
    the real one."""
    kwargs: dict[str, Any]
    signature: str
    is_exact: bool
    """Whether its result must be a real one. Made numbers will not do where they must agree with
    each other, as the sizes of groups with the number of rows: results in whole numbers, and all
    that follows from whole numbers and masks alone, are always computed."""
    is_small: bool
    """Whether it takes no more time to run it than to make up its result."""
    is_region: bool
    """Whether it calls a graph of its own, in a mode of its own."""
    needs_validity: bool
    """Whether it refuses some values of its arguments."""


def steps_of(program: ExportedProgram, graph: OpGraph, device: torch.device) -> list[Step]:
    """Return the operators of `program` in order, to be run on `device`.

    Raises:
        SpecError: when `graph` is not the graph of `program`, or sizes are symbols.

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
        args = tuple(_on_device(given, device) for given in node.args)
        kwargs = {name: _on_device(given, device) for name, given in node.kwargs.items()}
        steps.append(
            Step(
                node,
                args,
                kwargs,
                signature(node),
                is_exact=node in exact,
                is_small=_is_small(node),
                is_region=node.target in REGIONS,
                needs_validity=holds_validity(node),
            )
        )
    return steps


def _is_small(node: fx.Node) -> bool:
    touched = [node.meta.get("val"), *(given.meta.get("val") for given in node.all_input_nodes)]
    tensors = [leaf for leaf in tree_leaves(touched) if isinstance(leaf, Tensor)]
    return sum(t.numel() * t.element_size() for t in tensors) <= _SMALL_BYTES


def _on_device(given: Any, device: torch.device) -> Any:  # noqa: ANN401 - as torch types arguments
    if isinstance(given, fx.Node) and given.op == "get_attr":
        return runnable_body(body_of(given), device)
    if isinstance(given, list):
        return [_on_device(item, device) for item in given]
    return device if isinstance(given, torch.device) else given


def _exact_inputs(program: ExportedProgram) -> set[fx.Node]:
    """Return the inputs that are whole numbers or masks, once no size is a symbol."""
    found = set()
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
            found.add(node)
    return found


def _is_exact(node: fx.Node, exact: set[fx.Node]) -> bool:
    made = [leaf for leaf in tree_leaves(node.meta.get("val")) if isinstance(leaf, Tensor)]
    read = [given for given in node.all_input_nodes if given.meta.get("val") is not None]
    whole = [t for t in made if not (t.is_floating_point() or t.is_complex())]
    # A mask may be any: random ones will do.
    return any(t.dtype != torch.bool for t in whole) or all(given in exact for given in read)
