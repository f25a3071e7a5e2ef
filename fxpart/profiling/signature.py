"""What decides an operator's time: what it calls, on tensors of which shapes, how."""

from typing import Any

import torch
from torch import Tensor, fx

from fxpart.capture.regions import body_of
from fxpart.stable_json import stable_digest

__all__ = ["shapes_of", "signature"]


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
