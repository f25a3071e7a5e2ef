"""Real updates by torch.optim, measured by an independent counter of live storages."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fxpart.capture.live_bytes import LiveBytes, storage_sizes
from fxpart.core.optimizer import Optimizer

_MADE: dict[str, Any] = {
    "sgd": lambda weights, how: torch.optim.SGD(weights, lr=0.1, **how),
    "momentum": lambda weights, how: torch.optim.SGD(weights, lr=0.1, momentum=0.9, **how),
    "adam": lambda weights, how: torch.optim.Adam(weights, **how),
    "adamw": lambda weights, how: torch.optim.AdamW(weights, **how),
}
_HOW = {"for_loop": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}


@dataclass(frozen=True)
class RealUpdates:
    """The measured memory of an optimizer step, in bytes."""

    state: int
    """State of the optimizer, and float32 copies."""
    peak: int
    """Peak bytes: weights, gradients, state, and temporaries of the step."""


def real_updates(module: nn.Module, optimizer: Optimizer) -> RealUpdates:
    """Return the memory of the second step of `optimizer`; the first one creates its state."""
    weights = [weight for weight in module.parameters() if weight.requires_grad]
    masters = [
        weight.detach().float().requires_grad_() if _has_master(weight, optimizer) else weight
        for weight in weights
    ]
    updates = _MADE[optimizer.name](masters, _HOW[optimizer.implementation])
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    _step(updates, weights, masters)
    states = [s for state in updates.state.values() for s in state.values() if torch.is_tensor(s)]
    copies = [
        master for master, weight in zip(masters, weights, strict=True) if master is not weight
    ]
    kept_sizes = storage_sizes([*states, *copies])
    gradients = [weight.grad for weight in weights if weight.grad is not None]
    resident = storage_sizes([*module.parameters(), *gradients]) | kept_sizes
    with LiveBytes([resident]) as live:
        _step(updates, weights, masters)
    return RealUpdates(sum(kept_sizes.values()), live.peak_bytes[0])


def _has_master(weight: Tensor, optimizer: Optimizer) -> bool:
    return optimizer.master_weights and weight.element_size() < 4


def _step(
    updates: torch.optim.Optimizer, weights: Sequence[Tensor], masters: Sequence[Tensor]
) -> None:
    """Update the weights; a float32 copy is updated with its weight's gradient, cast before."""
    copied = [(m, w) for m, w in zip(masters, weights, strict=True) if m is not w]
    for master, weight in copied:
        assert weight.grad is not None
        master.grad = weight.grad.float()
    updates.step()
    for master, weight in copied:
        weight.detach().copy_(master.detach())
        master.grad = None
