"""Weights and inputs of a program, made when they are first needed on the device."""

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

__all__ = ["Given", "given_to", "made_value", "made_weight"]


# Tensors that stand for what a model was captured without: weights, inputs, skipped results.
#
# Their values are random, of a size that keeps results neither huge nor vanishing: a number close
# to zero (a denormal one) would take a processor many times as long.

_BLOCK = 2**20
_MOST_INTEGER = 2**15


def made_value(like: Tensor, device: torch.device) -> Tensor:
    """Return a tensor like an input or a result: normally distributed, or small whole numbers."""
    return _made(like, device, 1.0, 0.0)


def made_weight(like: Tensor, device: torch.device) -> Tensor:
    """Return a tensor like a weight or a buffer.

    A matrix or filter keeps the size of what it is applied to; a vector is near 1, as the weight
    of a norm and its running variance are; whole numbers count up, as positions do; a mask is true.
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
    """Return a tensor of that shape, strides and dtype; whole numbers stay small."""
    # Of a small tensor, no more is made than it needs: the rest would empty the caches.
    elements = _elements(like)
    normal, whole = _normal()[:elements], _whole()[:elements]
    if like.dtype == torch.bool:
        block = normal > 0
    elif like.is_floating_point():
        block = normal if (scale, shift) == (1.0, 0.0) else normal * scale + shift
    elif like.is_complex():
        block = torch.complex(normal * scale, normal * scale)
    else:
        block = whole.remainder(_most(like.dtype))
    return _strided(like, block.to(device, like.dtype), device)


def _elements(like: Tensor) -> int:
    """Return how many elements the storage of a tensor laid out as `like` has at least."""
    if like.numel() == 0:
        return 0
    dims = zip(like.shape, like.stride(), strict=True)
    return 1 + sum((int(size) - 1) * int(stride) for size, stride in dims)


def _strided(like: Tensor, block: Tensor, device: torch.device) -> Tensor:
    """Return `block`, repeated as often as needed, in the layout of `like`."""
    elements = _elements(like)
    block = block.reshape(-1)[:elements]
    # Random numbers cost more than copying them does, and times do not depend on repeats.
    flat = torch.empty(elements, dtype=like.dtype, device=device)
    whole, rest = divmod(elements, max(1, block.numel()))
    flat[: elements - rest].view(whole, -1 if whole else 0).copy_(block)
    flat[elements - rest :].copy_(block[:rest])
    return flat.as_strided(like.shape, like.stride())


@cache
def _normal() -> Tensor:
    return torch.randn(_BLOCK, generator=torch.Generator().manual_seed(0))


@cache
def _whole() -> Tensor:
    return torch.randint(_MOST_INTEGER, (_BLOCK,), generator=torch.Generator().manual_seed(1))


_MOST_KEPT_BYTES = 4 * 2**30
_KEPT_SHARE = 0.25
_EVICTING_BYTES = 96 * 2**20
"""More than the last cache of most processors and GPUs."""


@dataclass(eq=False, slots=True)
class Given:
    """What a program's placeholders stand for. Tied weights are one tensor."""

    device: torch.device
    keep: bool
    """Whether tensors stay from pass to pass: then all of a pass are made before it, and lie where
    they would in a real run. Else they are made before each use, and dropped after the last."""
    likes: dict[fx.Node, Any]
    """What stands for each placeholder in the captured graph."""
    real: dict[fx.Node, Tensor]
    """Tensors of whole numbers whose values are known: positions, tables of indices."""
    key: dict[fx.Node, Hashable]
    """Equal for the names of one tensor; not there for an input."""
    made: dict[Hashable, Tensor] = field(default_factory=dict)

    def make(self, nodes: Iterable[fx.Node]) -> bool:
        """Make what is not there yet of the placeholders among `nodes`; return whether any was."""
        before = len(self.made)
        for node in nodes:
            key = self.key.get(node, node)
            if isinstance(self.likes.get(node), Tensor) and key not in self.made:
                self.made[key] = self._new(node)
        return len(self.made) > before

    def _new(self, node: fx.Node) -> Tensor:
        if node in self.real:
            # A copy: an operator may write into it.
            return self.real[node].detach().to(self.device, copy=True)
        make = made_weight if node in self.key else made_value
        return make(self.likes[node], self.device)

    def value(self, node: fx.Node) -> Any:  # noqa: ANN401 - a placeholder may be any constant
        """Return what the placeholder stands for; its tensor must have been made."""
        like = self.likes[node]
        return self.made[self.key.get(node, node)] if isinstance(like, Tensor) else like

    def replace(self, node: fx.Node, tensor: Tensor) -> None:
        """Let `tensor` stand for a placeholder from now on; other nodes are left alone."""
        if node in self.likes:
            self.made[self.key.get(node, node)] = tensor

    def drop(self, nodes: Iterable[fx.Node]) -> None:
        """Let go of the tensors of the placeholders among `nodes`, unless they are to be kept."""
        if not self.keep:
            for node in nodes:
                self.made.pop(self.key.get(node, node), None)

    def evict(self) -> None:
        """Push what was just written out of the device's caches, as a run of the model would."""
        torch.empty(_EVICTING_BYTES, dtype=torch.uint8, device=self.device).fill_(1)


def given_to(program: ExportedProgram, device: torch.device) -> Given:
    """Return what `program` is given, nothing made yet."""
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
        held = program.state_dict.get(name, program.constants.get(name)) if name else None
        if not isinstance(held, Tensor):
            continue
        key[node] = place_in_memory(held)
        if held.device.type != "meta" and not held.is_floating_point() and type(held) is Tensor:
            real[node] = held
    return Given(device, _fits(likes, key, device), likes, real, key)


def _fits(likes: dict[fx.Node, Any], key: dict[fx.Node, Hashable], device: torch.device) -> bool:
    once = {key.get(node, node): like for node, like in likes.items() if isinstance(like, Tensor)}
    total = sum(int(like.numel()) * like.element_size() for like in once.values())
    return total <= min(_MOST_KEPT_BYTES, _KEPT_SHARE * free_bytes(device))
