"""Refuse factories' models and inputs that torch cannot process, with a one-line message."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._pytree import keystr, tree_flatten_with_path

from fxpart.errors import CaptureError

__all__ = ["MOST_NESTED", "refuse_inputs", "refuse_module"]

MOST_NESTED = 128
"""Depth of nested modules. torch visits them recursively, and Python's stack is limited to 1,000
calls; published models have a depth of about 10."""


def refuse_module(factory: str, module: nn.Module) -> None:
    """Refuse TorchScript, deeply nested modules, names that are no valid source, odd tensors.

    Raises:
        CaptureError: if there is one; the message names the module, parameter or buffer.

    """
    above: list[nn.Module] = []
    waiting: list[tuple[int, str, nn.Module]] = [(0, "", module)]
    walked: set[int] = set()
    while waiting:
        depth, path, inner = waiting.pop()
        del above[depth:]
        if isinstance(inner, torch.jit.ScriptModule):
            raise CaptureError(
                f"factory={factory}: {f'module {path[:-1]}' if path else 'its model'} is"
                " TorchScript, which torch.export does not capture; return the nn.Module that it"
                " was made from"
            )
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
    """Refuse inputs that are not dense tensors of plain numbers.

    Raises:
        CaptureError: if there is one; the message names the input.

    """
    for path, value in tree_flatten_with_path(inputs)[0]:
        if isinstance(value, Tensor):
            _refuse_tensor(factory, f"input {keystr(path)}", value)


def _refuse_names(factory: str, path: str, names: Iterable[str]) -> None:
    """Refuse names that would break the source that torch generates from them."""
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
