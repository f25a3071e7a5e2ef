"""On which logical device each part of a backward is computed: `BackwardDevices`.

Autograd computes the gradient of an operator where the operator was computed, and hands the
gradient of what another device had received back to its maker, a copy as all that is handed over.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.autograd.graph import Node
from torch.utils._pytree import tree_leaves, tree_map_only

from fxpart.execution.live_bytes import LiveBytes
from fxpart.execution.training_loss import training_loss

__all__ = ["BackwardDevices"]


@dataclass(eq=False, slots=True)
class BackwardDevices:
    """Tells a counter, while autograd runs a backward, which device is computing.

    It must be told of all that the forward computes: `tag`, `received`, `lent` and `loss`.
    """

    counter: LiveBytes
    _device_of: dict[Node, int] = field(default_factory=dict)
    """Autograd's nodes, and the device of the call that they are of."""
    _received: set[Hashable] = field(default_factory=set)
    _lent: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    """Weights by number and by device other than their home."""
    _home_of: dict[int, int] = field(default_factory=dict)
    """The device that first reads a weight, by number; its gradient is added up there."""

    def tag(self, result: object, device: int) -> None:
        """Remember that what autograd recorded for `result`, and nobody has yet, is of `device`."""
        waiting = [leaf.grad_fn for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        while waiting:
            node = waiting.pop()
            # A weight's own node belongs to the weight, and outlives this step.
            if node is None or node in self._device_of or hasattr(node, "variable"):
                continue
            self._device_of[node] = device
            node.register_prehook(_Begin(self.counter, device))
            waiting.extend(before for before, _ in node.next_functions)

    def received(self, name: Hashable, value: Any, maker: int) -> Any:  # noqa: ANN401
        """Return a value that another device has received, as it is read there.

        At its first reading, `name` not being known yet: from the backward of the first reader,
        which runs last, the gradient goes to device `maker` at once.
        """
        if name in self._received:
            return value
        self._received.add(name)
        return tree_map_only(Tensor, partial(self._handed, maker=maker, is_copy=True), value)

    def lent(self, weight: Any, device: int | None) -> Any:  # noqa: ANN401
        """Return a weight as `device` reads it; elsewhere than at home, gradients go home."""
        if device is None or not isinstance(weight, Tensor):
            return weight
        # The module keeps its weights alive, so that the numbers of objects are their own.
        home = self._home_of.setdefault(id(weight), device)
        if home == device:
            return weight
        key = (id(weight), device)
        if key not in self._lent:
            self._lent[key] = self._handed(weight, home, is_copy=False)
        return self._lent[key]

    def loss(self, results: Sequence[Tensor]) -> Tensor:
        """Return the loss, computed where the result is that it is of. The forward ends with it."""
        first = next((result for result in results if result.is_floating_point()), None)
        node = None if first is None else first.grad_fn
        device = 0 if node is None else self._device_of.get(node, 0)
        self.counter.move_to(device)
        loss = training_loss(results)
        self.tag(loss, device)
        # What the loss does not depend on is dropped with the results.
        self._device_of.clear()
        self._lent.clear()
        return loss

    def _handed(self, tensor: Tensor, maker: int, *, is_copy: bool) -> Tensor:
        if not tensor.requires_grad:
            return tensor
        handed: Tensor = _Handed.apply(tensor, is_copy)  # type: ignore[no-untyped-call]
        self.tag(handed, maker)
        return handed


class _Handed(torch.autograd.Function):
    """The same tensor; its gradient is a copy, made by the device that gets it."""

    @staticmethod
    def forward(ctx: FunctionCtx, tensor: Tensor, is_copy: bool) -> Tensor:
        """Return the tensor, or a view of one that is no copy."""
        if not is_copy:
            return tensor.view_as(tensor)
        # Not a view: an operator may write into what it received.
        ctx.mark_dirty(tensor)  # type: ignore[no-untyped-call]
        return tensor

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: FunctionCtx,  # noqa: ARG004 - as torch calls it
        gradient: Tensor,
    ) -> tuple[Tensor, None]:
        """Return a copy of the gradient."""
        return gradient.clone(), None


@dataclass(frozen=True, eq=False, slots=True)
class _Begin:
    """Called by autograd right before one of its nodes runs."""

    counter: LiveBytes
    device: int

    def __call__(self, gradients: Sequence[Tensor]) -> None:
        self.counter.move_to(self.device)
