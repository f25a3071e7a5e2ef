"""Made-up tensors for a program captured without data: weights, inputs, skipped results."""

import math
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor, fx
from torch.export import ExportedProgram

from fxpart.capture.calls import place_in_memory
from fxpart.execution.device import free_bytes

__all__ = ["Placeholders", "made_value", "made_weight", "placeholders_of"]

_BLOCK = 2**20
_MOST_INTEGER = 2**15
_MOST_KEPT_BYTES = 4 * 2**30
_KEPT_SHARE = 0.25
_EVICTING_BYTES = 96 * 2**20
"""Larger than the last-level cache of most processors and GPUs."""


# Made-up tensors. Their values are random, of a magnitude that keeps results from growing or
# vanishing, since denormal numbers are many times slower on a CPU.


def made_value(like: Tensor, device: torch.device) -> Tensor:
    """Return a tensor like an input or a result: normally distributed, or small integers."""
    return _made(like, device, 1.0, 0.0)


def made_weight(like: Tensor, device: torch.device) -> Tensor:
    """Return a tensor like a weight or a buffer.

    A matrix or filter preserves the magnitude of its operand; a vector is near 1, like the weight
    and the running variance of a norm; integers count up, like positions; a mask is true.
    """
    if like.dtype == torch.bool:
        return _strided(like, torch.ones((), dtype=torch.bool, device=device), device)
    if not (like.is_floating_point() or like.is_complex()):
        last = int(like.shape[-1]) if like.dim() else 1
        count = torch.arange(max(1, last), device=device).remainder(_most(like.dtype))
        return _strided(like, count.to(like.dtype), device)
    if like.dim() < 2:
        return _made(like, device, 0.1, 1.0)
    fan_in = max(1, int(like.numel()) // max(1, int(like.shape[0])))
    return _made(like, device, 1.0 / math.sqrt(fan_in), 0.0)


def _most(dtype: torch.dtype) -> int:
    return min(_MOST_INTEGER, torch.iinfo(dtype).max)


def _made(like: Tensor, device: torch.device, scale: float, shift: float) -> Tensor:
    """Return a tensor of the same shape, strides and dtype as `like`; integers stay small."""
    # No more than a small tensor needs, since touching the rest would evict cached data.
    elements = _elements(like)
    normal, integers = _normal()[:elements], _whole()[:elements]
    if like.dtype == torch.bool:
        block = normal > 0
    elif like.is_floating_point():
        block = normal if (scale, shift) == (1.0, 0.0) else normal * scale + shift
    elif like.is_complex():
        block = torch.complex(normal * scale, normal * scale)
    else:
        block = integers.remainder(_most(like.dtype))
    return _strided(like, block.to(device, like.dtype), device)


def _elements(like: Tensor) -> int:
    """Return the least number of elements in the storage of a tensor laid out as `like`."""
    if like.numel() == 0:
        return 0
    dims = zip(like.shape, like.stride(), strict=True)
    return 1 + sum((int(size) - 1) * int(stride) for size, stride in dims)


def _strided(like: Tensor, block: Tensor, device: torch.device) -> Tensor:
    """Return `block`, repeated as often as needed, in the layout of `like`."""
    elements = _elements(like)
    block = block.reshape(-1)[:elements]
    # Copying is cheaper than drawing random numbers, and repetition does not affect times.
    flat = torch.empty(elements, dtype=like.dtype, device=device)
    repeats, remainder = divmod(elements, max(1, block.numel()))
    flat[: elements - remainder].view(repeats, -1 if repeats else 0).copy_(block)
    flat[elements - remainder :].copy_(block[:remainder])
    return flat.as_strided(like.shape, like.stride())


@cache
def _normal() -> Tensor:
    return torch.randn(_BLOCK, generator=torch.Generator().manual_seed(0))


@cache
def _whole() -> Tensor:
    return torch.randint(_MOST_INTEGER, (_BLOCK,), generator=torch.Generator().manual_seed(1))


# Weights and inputs.


@dataclass(eq=False, slots=True)
class Placeholders:
    """Values of a program's placeholders, created when needed. Tied weights share one tensor."""

    device: torch.device
    keep: bool
    """Whether tensors persist across passes: then all are created before a pass, laid out in memory
    as in a real run. Otherwise they are created before each use and dropped after the last."""
    likes: dict[fx.Node, Any]
    """Captured value of each placeholder: a fake tensor or a constant."""
    real: dict[fx.Node, Tensor]
    """Integer tensors with known values, such as positions and index tables."""
    key: dict[fx.Node, Hashable]
    """Key shared by all names of one weight; absent for an input."""
    tensors: dict[Hashable, Tensor] = field(default_factory=dict)

    def make(self, nodes: Iterable[fx.Node]) -> bool:
        """Create missing tensors of placeholders among `nodes`; return whether any was created."""
        previous_count = len(self.tensors)
        for node in nodes:
            key = self.key.get(node, node)
            if isinstance(self.likes.get(node), Tensor) and key not in self.tensors:
                self.tensors[key] = self._new(node)
        return len(self.tensors) > previous_count

    def _new(self, node: fx.Node) -> Tensor:
        if node in self.real:
            # Copied, since an operator may write into it.
            return self.real[node].detach().to(self.device, copy=True)
        make = made_weight if node in self.key else made_value
        return make(self.likes[node], self.device)

    def value(self, node: fx.Node) -> Any:  # noqa: ANN401 - a placeholder may be any constant
        """Return the value of a placeholder, whose tensor must exist."""
        like = self.likes[node]
        return self.tensors[self.key.get(node, node)] if isinstance(like, Tensor) else like

    def replace(self, node: fx.Node, tensor: Tensor) -> None:
        """Set the value of a placeholder to `tensor`; ignore other nodes."""
        if node in self.likes:
            self.tensors[self.key.get(node, node)] = tensor

    def drop(self, nodes: Iterable[fx.Node]) -> None:
        """Drop the tensors of the placeholders among `nodes`, unless `keep` is set."""
        if not self.keep:
            for node in nodes:
                self.tensors.pop(self.key.get(node, node), None)

    def evict(self) -> None:
        """Evict new tensors from the device's caches, as a run of the model would."""
        torch.empty(_EVICTING_BYTES, dtype=torch.uint8, device=self.device).fill_(1)


def placeholders_of(program: ExportedProgram, device: torch.device) -> Placeholders:
    """Return the placeholders of `program`, without creating any tensor."""
    signature = program.graph_signature
    names = {
        **signature.inputs_to_parameters,
        **signature.inputs_to_buffers,
        **signature.inputs_to_lifted_tensor_constants,
    }
    likes: dict[fx.Node, Any] = {}
    real: dict[fx.Node, Tensor] = {}
    key: dict[fx.Node, Hashable] = {}
    for node in program.graph.find_nodes(op="placeholder"):
        likes[node] = node.meta.get("val")
        name = names.get(node.name)
        weight = program.state_dict.get(name, program.constants.get(name)) if name else None
        if not isinstance(weight, Tensor):
            continue
        key[node] = place_in_memory(weight)
        is_integer = not weight.is_floating_point()
        if weight.device.type != "meta" and is_integer and type(weight) is Tensor:
            real[node] = weight
    distinct = {key.get(n, n): like for n, like in likes.items() if isinstance(like, Tensor)}
    total_bytes = sum(int(like.numel()) * like.element_size() for like in distinct.values())
    keep = total_bytes <= min(_MOST_KEPT_BYTES, _KEPT_SHARE * free_bytes(device))
    return Placeholders(device, keep, likes, real, key)
