"""What no model of a factory may have: refused in one line before torch stumbles over it."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._pytree import keystr, tree_flatten_with_path

from fxpart.errors import CaptureError

__all__ = ["MOST_NESTED", "refuse_inputs", "refuse_module"]

MOST_NESTED = 128
"""Modules inside one another. torch walks them by calls that call themselves, and Python's stack
ends at 1,000 of these; published models have some 10."""


def refuse_module(factory: str, module: nn.Module) -> None:
    """Refuse modules that torch cannot walk, names that cannot be written, and tensors as below.

    Raises:
        CaptureError: naming the module, parameter or buffer.

    """
    above: list[nn.Module] = []
    waiting: list[tuple[int, str, nn.Module]] = [(0, "", module)]
    walked: set[int] = set()
    while waiting:
        depth, path, inner = waiting.pop()
        del above[depth:]
        if any(inner is outer for outer in above):
            raise CaptureError(
                f"factory={factory}: module {path[:-1]} contains itself; take it out"
            )
        if depth > MOST_NESTED:
            raise CaptureError(
                f"factory={factory}: modules are nested more than {MOST_NESTED} deep; put them "
                "side by side, as in nn.Sequential"
            )
        above.append(inner)
        if id(inner) in walked:
            continue
        walked.add(id(inner))
        named = {**inner._parameters, **inner._buffers}
        _refuse_names(factory, path, (*named, *inner._modules))
        for name, tensor in named.items():
            if tensor is not None:
                _refuse_tensor(factory, f"weight {path}{name}", tensor)
        waiting += [
            (depth + 1, f"{path}{name}.", child)
            for name, child in inner._modules.items()
            if child is not None
        ]


def refuse_inputs(factory: str, inputs: object) -> None:
    """Refuse inputs that are no dense tensors of plain numbers.

    Raises:
        CaptureError: naming the input.

    """
    for path, value in tree_flatten_with_path(inputs)[0]:
        if isinstance(value, Tensor):
            _refuse_tensor(factory, f"input {keystr(path)}", value)


def _refuse_names(factory: str, path: str, names: Iterable[str]) -> None:
    """Refuse names that would break out of the source that torch generates with them."""
    for name in names:
        if not isinstance(name, str) or not name.isprintable() or set(name) & set("\"'\\"):
            where = f" in {path[:-1]}" if path else ""
            raise CaptureError(
                f"factory={factory}: the name {name!r}{where} has a quote, a backslash, or an "
                "unprintable character; use letters, digits and _"
            )


def _refuse_tensor(factory: str, what: str, tensor: Tensor) -> None:
    if is_lazy(tensor):
        raise CaptureError(
            f"factory={factory}: {what} has no shape yet (a lazy module); run the model once in"
            " the factory, or give the module its sizes"
        )
    kind = ""
    if tensor.is_nested:
        kind = "nested"
    elif tensor.is_quantized:
        kind = "quantized"
    elif tensor.layout is not torch.strided:
        kind = str(tensor.layout).removeprefix("torch.")
    if kind:
        raise CaptureError(
            f"factory={factory}: {what} is a {kind} tensor, whose bytes are not known; use a dense"
            " one"
        )
