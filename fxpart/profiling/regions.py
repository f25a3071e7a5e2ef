"""Regions: calls of a graph of its own, run under autocast or with gradients on or off."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_map

from fxpart.capture.regions import REGIONS, body_of
from fxpart.profiling.valid_arguments import bent_nodes, needs_validity, valid_arguments

__all__ = ["as_captured", "holds_validity", "runnable_body", "valid_region_arguments"]

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
