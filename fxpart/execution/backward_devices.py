"""On which logical device each part of a backward is computed: `BackwardDevices`.

Autograd computes the gradient of an operator where the operator was computed. The gradient of a
value is a sum over its readers, the last one first, and each adds its part where it is computed:

    value made on 0, read on 0, 1, 1, 2:    0 <-- 0 <-- 1 <-- 1 <-- 2

So the sum goes from the last reader's device to the one before, a copy each time as all that is
handed over, and in the end to the value's maker.
"""

import weakref
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.autograd.graph import Node
from torch.utils._pytree import tree_leaves, tree_map

from fxpart.capture.training.loss import first_real, training_loss
from fxpart.execution.live_bytes import LiveBytes

__all__ = ["BackwardDevices"]


@dataclass(eq=False, slots=True)
class BackwardDevices:
    """Tells a counter, while autograd runs a backward, which device is computing.

    It must be told of all that the forward computes and reads: `made`, `read`, `lent`, `loss`.
    """

    counter: LiveBytes
    _device_of: dict[Node, int] = field(default_factory=dict)
    """Autograd's nodes, and the device of the call that they are of."""
    _tips: dict[Hashable, "_Tip"] = field(default_factory=dict)
    """Where the sum of a value's gradient begins so far."""
    _weights: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    """Weights by number and device, as they are read there."""
    _last_reader: dict[int, int] = field(default_factory=dict)
    """The device that read a weight last, by number."""
    _copies: dict[Hashable, tuple[weakref.ref[Any], weakref.ref[Tensor]]] = field(
        default_factory=dict
    )
    """Storages of gradients, and their copies elsewhere."""

    def made(self, name: Hashable, value: object, device: int, *, is_sent: bool) -> None:
        """Say that `device` has computed `value`, and whether other devices will read it."""
        self._tag(value, device)
        if is_sent:
            self._tips[name] = _Tip(device, self._ends(value, device))

    def read(self, name: Hashable, value: Any, device: int | None) -> Any:  # noqa: ANN401
        """Return `value`, which `device` has made or received, as an operator there reads it.

        What is returned takes the place of `value` on that device.
        """
        tip = self._tips.get(name)
        if tip is None or device is None or tip.device == device:
            return value
        handed = tree_map(lambda data, end: self._handed(data, end, tip.device), value, tip.ends)
        self._tips[name] = _Tip(device, self._ends(handed, device))
        return handed

    def lent(self, weight: Any, device: int | None) -> Any:  # noqa: ANN401
        """Return a weight as an operator on `device` reads it."""
        if device is None or not isinstance(weight, Tensor) or not weight.requires_grad:
            return weight
        # The module keeps its weights alive, so that the numbers of objects are their own.
        number = id(weight)
        before = self._last_reader.setdefault(number, device)
        last = self._weights.get((number, before), weight)
        if before != device:
            last = self._handed(weight, last, before)
        self._last_reader[number] = device
        self._weights[number, device] = last
        return last

    def loss(self, results: Sequence[Tensor]) -> Tensor:
        """Return the loss, computed where the result is that it is of. The forward ends with it."""
        first = first_real(results)
        node = None if first is None else first.grad_fn
        device = 0 if node is None else self._device_of.get(node, 0)
        self.counter.move_to(device)
        loss = training_loss(results)
        self._tag(loss, device)
        # What the loss does not depend on is dropped with the results.
        self._device_of.clear()
        self._tips.clear()
        self._weights.clear()
        return loss

    def sent(self, gradient: Tensor, device: int) -> Tensor:
        """Return the copy of a gradient that `device` gets: of one tensor, one."""
        if gradient.is_sparse:
            return gradient.clone()
        storage = gradient.untyped_storage()
        key = (storage._cdata, gradient.storage_offset(), gradient.shape, gradient.stride(), device)
        source, copy = self._copies.get(key, (None, None))
        # Numbers of storages are given again once they are gone.
        known = None if copy is None or source is None or source() is None else copy()
        if known is not None:
            return known
        made = gradient.clone()
        self._copies[key] = (weakref.ref(storage), weakref.ref(made))
        return made

    def _tag(self, result: object, device: int) -> None:
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

    def _ends(self, value: object, device: int) -> Any:  # noqa: ANN401
        ends = tree_map(lambda leaf: self._end(leaf) if _is_variable(leaf) else None, value)
        self._tag(ends, device)
        return ends

    def _end(self, tensor: Tensor) -> Tensor:
        with self.counter.paused():
            end: Tensor = _End.apply(tensor)  # type: ignore[no-untyped-call]
        return end

    def _handed(self, data: Any, end: Tensor | None, to: int) -> Any:  # noqa: ANN401
        if end is None or not isinstance(data, Tensor):
            return data
        handed: Tensor = _Handed.apply(end, data.detach(), self, to)  # type: ignore[no-untyped-call]
        self._tag(handed, to)
        return handed


@dataclass(frozen=True, eq=False, slots=True)
class _Tip:
    """The last reader of a value so far: what is read next hands its gradient to it."""

    device: int
    ends: Any
    """Of each tensor in the value that has a gradient, an `_End`; else None."""


def _is_variable(leaf: object) -> bool:
    return isinstance(leaf, Tensor) and leaf.requires_grad


class _End(torch.autograd.Function):
    """Takes a gradient for a tensor whose memory may be gone when that is asked for."""

    @staticmethod
    def forward(ctx: FunctionCtx, tensor: Tensor) -> Tensor:
        """Return a tensor of the same shape that takes no memory."""
        return tensor.new_empty(()).expand(tensor.shape)

    @staticmethod
    def backward(ctx: FunctionCtx, gradient: Tensor) -> Tensor:
        """Return the gradient."""
        return gradient


class _Handed(torch.autograd.Function):
    """Data of one device, whose gradient is sent to another."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401 - torch lets it take attributes
        end: Tensor,  # which the gradient goes to
        data: Tensor,
        devices: BackwardDevices,
        to: int,
    ) -> Tensor:
        """Return the data, as no view of it: an operator may write into what it received."""
        ctx.devices, ctx.to = devices, to
        layout = data.storage_offset(), data.shape, data.stride()
        # The last argument of `set_` is the stride.
        return data.new_empty(0).set_(data.untyped_storage(), *layout)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:  # noqa: ANN401
        """Return the gradient as its receiver gets it."""
        return ctx.devices.sent(gradient, ctx.to), None, None, None


@dataclass(frozen=True, eq=False, slots=True)
class _Begin:
    """Called by autograd right before one of its nodes runs."""

    counter: LiveBytes
    device: int

    def __call__(self, gradients: Sequence[Tensor]) -> None:
        """Let what is made next be made on the device of that node."""
        self.counter.move_to(self.device)
