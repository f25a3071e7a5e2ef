"""Lifetimes of a captured model's values in Python when the model is called eagerly.

A captured graph frees a value after its last reader. A module called eagerly keeps it until Python
releases it: a local variable until it is rebound or its function returns, an argument until the
call returns. `torch.export` runs that Python, so releases are observed during export, by weak
references; the nodes of the graph carry the observations, which `values_held` reads.
"""

import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from torch import Tensor, fx, nn
from torch._C import _TorchDispatchModeKey
from torch._ops import _get_dispatch_mode_pre_dispatch
from torch.autograd.graph import saved_tensors_hooks
from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode, get_proxy_slot
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from fxpart.core.graph import IntArray, OpGraph

__all__ = [
    "CALL",
    "HELD",
    "NO_CALL",
    "TO_THE_END",
    "positions_held",
    "values_held",
    "watching_python",
]

CALL = "fxpart_call"
"""Key of a node's ``meta``: the index, in Python's order, of the torch call that returned the
node's result. Nodes inside a torch function written in Python have none, and those of a backward,
which Python does not call, have `NO_CALL`."""
HELD = "fxpart_held"
"""Key of a node's ``meta``: for each tensor received by Python as the node's result, the number of
calls made when Python released it; shared by copies of the node."""
NO_CALL = -1
TO_THE_END = 2**62
"""In `HELD`: until the end of the forward."""
FOREVER = TO_THE_END + 1
"""In `HELD`: beyond the end of the forward, as by an attribute of a module."""


@contextmanager
def watching_python(module: nn.Module) -> Iterator[None]:
    """Make exports of `module` inside the block set `CALL` and `HELD` on their nodes.

    Tensors released by Python must really be freed, so autograd is kept from saving tensors for a
    backward, which an export does not run.
    """
    watch = _Watch()
    # Before the export restores the attributes of the module.
    hook = module.register_forward_hook(lambda _module, _args, result: watch.end(result))
    try:
        with watch, saved_tensors_hooks(weakref.ref, lambda saved: saved()):
            yield
    finally:
        hook.remove()


def values_held(graph: OpGraph, nodes: Mapping[str, fx.Node]) -> IntArray:
    """Return, for each value of `graph`, the last operator that begins before Python releases it.

    A value that outlives the forward is held to the last operator, such as the last of a backward.

    Shape (V,); -1 for a value that Python never receives or keeps, or without observations.

    Args:
        graph: operators of an exported program, or of a training step of one.
        nodes: the call nodes of that program by name.

    """
    in_order = [nodes[name] for name in graph.names]
    forward = [op for op, node in enumerate(in_order) if node.meta.get(CALL) != NO_CALL]
    held_until = positions_held([in_order[op] for op in forward])
    last_held = np.full(graph.n_values, -1, dtype=np.int64)
    for value, name in enumerate(graph.value_names):
        releases = nodes[name].meta.get(HELD) if name in nodes else None
        if releases:
            position = held_until(releases)
            last = forward[position] if position >= 0 else -1
            last = graph.n_ops - 1 if FOREVER in releases else last
            last_held[value] = last if last > graph.value_producer[value] else -1
    return last_held


def positions_held(calls: Sequence[fx.Node]) -> Callable[[Sequence[int]], int]:
    """Return a function from releases, see `HELD`, to the last of `calls` that begins before them.

    `calls` are in order; the function returns a position, -1 for none.
    """
    begun: list[int] = []
    upcoming = TO_THE_END
    for node in reversed(calls):
        # An operator inside a torch function belongs to the next call that returns.
        upcoming = min(upcoming, node.meta.get(CALL) or upcoming)
        begun.append(upcoming)
    begun.reverse()
    return lambda releases: bisect_right(begun, max(releases)) - 1


class _Watch(TorchFunctionMode):
    """Records in the nodes of a graph being traced when Python receives and releases tensors."""

    def __init__(self) -> None:
        super().__init__()
        self._calls = 0
        # A callback only runs while its weak reference is alive.
        self._seen: list[tuple[weakref.ref[Tensor], list[int]]] = []

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

    def end(self, result: object) -> None:
        """Record that whatever Python still holds after the forward stays, as an attribute does.

        Its result is the caller's.
        """
        returned = {id(leaf) for leaf in tree_leaves(result)}
        for seen, releases in self._seen:
            tensor = seen()
            if tensor is not None and id(tensor) not in returned:
                releases.append(FOREVER)

    def _see(self, tensor: Tensor, mode: ProxyTorchDispatchMode) -> None:
        """Record that Python received a tensor, if it has a node in the graph."""
        slot = get_proxy_slot(tensor, mode.tracer, None)
        if slot is None:
            return
        meta = slot.proxy.node.meta
        meta.setdefault(CALL, self._calls)
        releases: list[int] = meta.setdefault(HELD, [])
        seen = weakref.ref(tensor, lambda _: releases.append(self._calls))
        self._seen.append((seen, releases))
