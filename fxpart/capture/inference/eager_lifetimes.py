"""How long Python keeps the values of a captured model when the model is called eagerly.

A captured graph frees a value after its last reader. A module that is called eagerly keeps it until
Python releases it: a local variable until it is bound again or its function returns, an argument
until the call returns. `torch.export` runs that Python, so every release is observed then, by weak
references; the nodes of the graph carry what was seen, and `values_held` reads it from them.
"""

import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
from torch import Tensor, fx
from torch._C import _TorchDispatchModeKey
from torch._ops import _get_dispatch_mode_pre_dispatch
from torch.autograd.graph import saved_tensors_hooks
from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode, get_proxy_slot
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from fxpart.core.graph import IntArray, OpGraph

__all__ = ["CALL", "HELD", "NO_CALL", "TO_THE_END", "values_held", "watching_python"]

CALL = "fxpart_call"
"""Key of a node's ``meta``: the number of the call of torch, counted as Python makes them, that
returned the node's result. Nodes inside a function of torch that is written in Python have none,
and those of a backward, which Python does not call, `NO_CALL`."""
HELD = "fxpart_held"
"""Key of a node's ``meta``: for each tensor that Python received as the node's result, how many
calls had been made when it released that; shared by the copies of a node."""
NO_CALL = -1
TO_THE_END = 2**62
"""In `HELD`: until the forward is done."""


@contextmanager
def watching_python() -> Iterator[None]:
    """Export programs in this context to have `CALL` and `HELD` on their nodes.

    What Python releases must be gone then, so autograd is kept from saving tensors for a backward,
    which no export runs.
    """
    with _Watch(), saved_tensors_hooks(weakref.ref, lambda saved: saved()):
        yield


def values_held(graph: OpGraph, nodes: Mapping[str, fx.Node]) -> IntArray:
    """Return for each value of `graph` the last operator that begins before Python releases it.

    Shape (V,); -1 for a value that Python never receives or keeps, and where nothing was seen.

    Args:
        graph: operators of an exported program, or of a training step of one.
        nodes: the call nodes of that program by name.

    """
    call_of = [nodes[name].meta.get(CALL) for name in graph.names]
    forward = [op for op, call in enumerate(call_of) if call != NO_CALL]
    calls: list[int] = []
    upcoming = TO_THE_END
    for op in reversed(forward):
        # An operator inside a function of torch belongs to the call that returns after it.
        upcoming = min(upcoming, call_of[op] or upcoming)
        calls.append(upcoming)
    calls.reverse()
    held = np.full(graph.n_values, -1, dtype=np.int64)
    for value, name in enumerate(graph.value_names):
        releases = nodes[name].meta.get(HELD) if name in nodes else None
        if releases:
            count = bisect_right(calls, max(releases))
            last = forward[count - 1] if count else -1
            held[value] = last if last > graph.value_producer[value] else -1
    return held


class _Watch(TorchFunctionMode):
    """Records in the nodes of a graph being traced when Python receives and releases tensors."""

    def __init__(self) -> None:
        super().__init__()
        self._calls = 0
        # A callback runs only while its reference lives.
        self._seen: list[weakref.ref[Tensor]] = []

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,  # noqa: ANN401 - as torch calls it
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        result = func(*args, **(kwargs or {}))
        mode = _get_dispatch_mode_pre_dispatch(_TorchDispatchModeKey.PROXY)  # type: ignore[no-untyped-call]
        if isinstance(mode, ProxyTorchDispatchMode):
            self._calls += 1
            for leaf in tree_leaves(result):
                if isinstance(leaf, Tensor):
                    self._see(leaf, mode)
        return result

    def _see(self, tensor: Tensor, mode: ProxyTorchDispatchMode) -> None:
        """Record that Python has a tensor, if that has a node in the graph."""
        slot = get_proxy_slot(tensor, mode.tracer, None)
        if slot is None:
            return
        meta = slot.proxy.node.meta
        meta.setdefault(CALL, self._calls)
        releases: list[int] = meta.setdefault(HELD, [])
        self._seen.append(weakref.ref(tensor, lambda _: releases.append(self._calls)))
