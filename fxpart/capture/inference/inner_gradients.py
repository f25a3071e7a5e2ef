"""Trace the gradients that a model takes inside its forward by `torch.autograd.grad`.

`torch.export` traces above autograd. It sees the operators of a backward there, but neither the
results that autograd saved, which it unpacks as new tensors, nor what a composite operator such as
``linear`` saved, which is made below. Here unpacked tensors share the node of the saved one, and
composite operators are traced as the operators that autograd differentiates.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch.fx.experimental import proxy_tensor
from torch.fx.experimental.proxy_tensor import (
    ProxyTorchDispatchMode,
    get_proxy_slot,
    set_proxy_slot,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ["SavedResults", "decomposed_as_by_autograd", "set_gradients"]

_DETACH = torch.ops.aten.detach.default
_KEPT_WHOLE = (
    torch.ops.aten.size.default,
    torch.ops.aten.stride.default,
    torch.ops.aten.storage_offset.default,
)
"""Composite calls without a result that autograd saves."""


@dataclass(eq=False, slots=True)
class _Result:
    """A tensor that a call returned below the mode that traces."""

    tensor: Tensor
    source: Tensor | None
    """The tensor it shares data with, if it may be autograd's copy."""
    call: int
    """Number of calls made when it was returned."""


class SavedResults(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Gives each tensor that autograd saves or unpacks the node of the tensor it shares data with.

    Entered below the mode that traces, which does not see these copies. Counts the calls, and
    passes each tensor to `see`, with its node and the number of its call.
    """

    def __init__(self, see: Callable[[Tensor, fx.Node, int], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls = 0
        self._see = see
        self._tracer: Any = None
        self._pending: list[_Result] = []
        """Results that may get a node: a call's result has none until the call has returned, after
        autograd saved it."""

    @contextmanager
    def tracing(self, mode: ProxyTorchDispatchMode) -> Iterator[None]:
        """Trace a call made by Python in the block, in the graph of `mode`."""
        self._tracer = mode.tracer
        try:
            with self:
                yield
            self._assign_nodes()
        finally:
            self._pending.clear()

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Any,  # noqa: ANN401 - as torch calls it
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        self._assign_nodes()
        result = func(*args, **(kwargs or {}))
        self.calls += 1
        source = args[0] if func is _DETACH else None
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._pending.append(_Result(leaf, source, self.calls))
        if source is not None:
            # Autograd computes with an unpacked tensor next. Its copy has just been traced, as a
            # constant; that of the model's own code gets its node later.
            self._share_node(result, source)
        return result

    def _assign_nodes(self) -> None:
        pending, self._pending = self._pending, []
        for result in pending:
            if result.source is not None and self._slot(result.tensor) is None:
                self._share_node(result.tensor, result.source)
            slot = self._slot(result.tensor)
            if slot is None:
                self._pending.append(result)
            else:
                self._see(result.tensor, slot.proxy.node, result.call)

    def _share_node(self, copy: Tensor, source: Tensor) -> None:
        slot = self._slot(source)
        if slot is not None:
            set_proxy_slot(copy, self._tracer, slot)

    def _slot(self, tensor: Tensor) -> Any:  # noqa: ANN401 - private upstream
        return get_proxy_slot(tensor, self._tracer, None)


@contextmanager
def decomposed_as_by_autograd() -> Iterator[None]:
    """Let exports in the block trace composite operators as the operators inside them.

    Not thread-safe.
    """
    upstream: Any = proxy_tensor
    original = upstream.maybe_handle_decomp

    def decomposed(
        mode: ProxyTorchDispatchMode,
        op: OpOverload,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:  # noqa: ANN401
        if op not in _KEPT_WHOLE and upstream.autograd_would_have_decomposed(
            op, tree_leaves((args, kwargs))
        ):
            with mode:
                result = op.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        return original(mode, op, args, kwargs)

    upstream.maybe_handle_decomp = decomposed
    try:
        yield
    finally:
        upstream.maybe_handle_decomp = original


@contextmanager
def set_gradients(mode: ProxyTorchDispatchMode, *, enabled: bool) -> Iterator[None]:
    """Record in the graph that gradients are enabled or disabled for the calls in the block.

    Autograd's engine sets this in C++ for a backward, unseen by `torch.export`.
    """
    before = torch.is_grad_enabled()
    _record(mode, enabled)
    try:
        yield
    finally:
        _record(mode, before)


def _record(mode: ProxyTorchDispatchMode, enabled: bool) -> None:
    """Add the node that `torch.export` has for a call of `torch.set_grad_enabled`."""
    node = mode.tracer.create_node("call_function", torch._C._set_grad_enabled, (enabled,), {})
    node.meta["val"] = None
