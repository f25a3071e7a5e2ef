"""`BackwardDevices`: track the logical device of each part of a backward pass.

Autograd computes the gradient of an operator on the operator's device. The gradient of a value is a
sum over its readers, from the last to the first, and each adds its part on its own device:

    value made on 0, read on 0, 1, 1, 2:    0 <-- 0 <-- 1 <-- 1 <-- 2

So the partial sum travels from the last reader's device to the previous reader's, copied where the
device changes, and finally to the value's producer.
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

from fxpart.capture.live_bytes import LiveBytes
from fxpart.capture.training.loss import first_real, training_loss

__all__ = ["BackwardDevices"]


@dataclass(eq=False, slots=True)
class BackwardDevices:
    """Moves a counter to the computing device while autograd runs a backward pass.

    The forward pass must report everything it computes and reads: `made`, `read`, `lent`, `loss`.
    """

    counter: LiveBytes
    _device_of: dict[Node, int] = field(default_factory=dict)
    """Device of the call that created each autograd node."""
    _tips: dict[Hashable, "_Tip"] = field(default_factory=dict)
    """The last reader of each value so far, where its gradient sum begins."""
    _weights: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    """Weights as read on a device, by ``id`` and device."""
    _last_reader: dict[int, int] = field(default_factory=dict)
    """The device that last read a weight, by ``id``."""
    _copies: dict[Hashable, tuple[weakref.ref[Any], weakref.ref[Tensor]]] = field(
        default_factory=dict
    )
    """Storages of gradients, and their copies on other devices."""

    def made(self, name: Hashable, value: object, device: int, *, is_sent: bool) -> None:
        """Record that `device` has computed `value`, and whether other devices will read it."""
        self._tag(value, device)
        if is_sent:
            self._tips[name] = _Tip(device, self._ends(value, device))

    def read(self, name: Hashable, value: Any, device: int | None) -> Any:  # noqa: ANN401
        """Return `value`, produced or received on `device`, as an operator there reads it.

        The result replaces `value` on that device.
        """
        tip = self._tips.get(name)
        if tip is None or device is None or tip.device == device:
            return value
        linked = tree_map(lambda data, end: self._linked(data, end, tip.device), value, tip.ends)
        self._tips[name] = _Tip(device, self._ends(linked, device))
        return linked

    def lent(self, weight: Any, device: int | None) -> Any:  # noqa: ANN401
        """Return a weight as an operator on `device` reads it."""
        if device is None or not isinstance(weight, Tensor) or not weight.requires_grad:
            return weight
        # The module keeps its weights alive, so that an ``id`` is never used twice.
        key = id(weight)
        last_device = self._last_reader.setdefault(key, device)
        last = self._weights.get((key, last_device), weight)
        if last_device != device:
            last = self._linked(weight, last, last_device)
        self._last_reader[key] = device
        self._weights[key, device] = last
        return last

    def loss(self, results: Sequence[Tensor]) -> Tensor:
        """Return the loss, computed on the device of its operand. Ends the forward pass."""
        first = first_real(results)
        node = None if first is None else first.grad_fn
        device = 0 if node is None else self._device_of.get(node, 0)
        self.counter.move_to(device)
        loss = training_loss(results)
        self._tag(loss, device)
        # Nodes that the loss does not depend on are freed with the results.
        self._device_of.clear()
        self._tips.clear()
        self._weights.clear()
        return loss

    def sent(self, gradient: Tensor, device: int) -> Tensor:
        """Return the copy of a gradient on `device`, made once per tensor."""
        if gradient.is_sparse:
            return gradient.clone()
        storage = gradient.untyped_storage()
        key = (storage._cdata, gradient.storage_offset(), gradient.shape, gradient.stride(), device)
        source, copy = self._copies.get(key, (None, None))
        # A storage's address may be reused once it is freed.
        existing = None if copy is None or source is None or source() is None else copy()
        if existing is not None:
            return existing
        clone = gradient.clone()
        self._copies[key] = (weakref.ref(storage), weakref.ref(clone))
        return clone

    def _tag(self, result: object, device: int) -> None:
        """Assign `device` to the nodes behind `result` that have no device yet."""
        pending = [leaf.grad_fn for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        while pending:
            node = pending.pop()
            # The node of a weight belongs to the weight and outlives this step.
            if node is None or node in self._device_of or hasattr(node, "variable"):
                continue
            self._device_of[node] = device
            node.register_prehook(_Begin(self.counter, device))
            pending.extend(parent for parent, _ in node.next_functions)

    def _ends(self, value: object, device: int) -> Any:  # noqa: ANN401
        def end(leaf: object) -> Tensor | None:
            if not isinstance(leaf, Tensor) or not leaf.requires_grad:
                return None
            with self.counter.paused():
                ended: Tensor = _End.apply(leaf)  # type: ignore[no-untyped-call]
            return ended

        ends = tree_map(end, value)
        self._tag(ends, device)
        return ends

    def _linked(self, data: Any, end: Tensor | None, to: int) -> Any:  # noqa: ANN401
        """Return `data` as a tensor whose gradient is sent to `end`, on device `to`."""
        if end is None or not isinstance(data, Tensor):
            return data
        linked: Tensor = _Linked.apply(end, data.detach(), self, to)  # type: ignore[no-untyped-call]
        self._tag(linked, to)
        return linked


@dataclass(frozen=True, eq=False, slots=True)
class _Tip:
    """The last reader of a value so far, to which the next reader sends its gradient."""

    device: int
    ends: Any
    """An `_End` for each tensor in the value that has a gradient; None for other leaves."""


class _End(torch.autograd.Function):
    """Receives the gradient of a tensor whose memory may have been freed."""

    @staticmethod
    def forward(ctx: FunctionCtx, tensor: Tensor) -> Tensor:
        """Return a tensor of the same shape that takes no memory."""
        return tensor.new_empty(()).expand(tensor.shape)

    @staticmethod
    def backward(ctx: FunctionCtx, gradient: Tensor) -> Tensor:
        """Return the gradient."""
        return gradient


class _Linked(torch.autograd.Function):
    """Data on one device whose gradient is sent to another."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401 - torch allows attributes on it
        end: Tensor,  # receives the gradient
        data: Tensor,
        devices: BackwardDevices,
        to: int,
    ) -> Tensor:
        """Return the data, not as a view, since an operator may write into it."""
        ctx.devices, ctx.to = devices, to
        layout = data.storage_offset(), data.shape, data.stride()
        # The last argument of `set_` is the stride.
        return data.new_empty(0).set_(data.untyped_storage(), *layout)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:  # noqa: ANN401
        """Return the receiver's copy of the gradient."""
        return ctx.devices.sent(gradient, ctx.to), None, None, None


@dataclass(frozen=True, eq=False, slots=True)
class _Begin:
    """Hook that autograd calls right before one of its nodes runs."""

    counter: LiveBytes
    device: int

    def __call__(self, gradients: Sequence[Tensor]) -> None:
        """Count new storages on the device of that node."""
        self.counter.move_to(self.device)
