"""Lifetimes of a captured model's values in Python when the model is called eagerly.

A captured graph frees a value after its last reader. A module called eagerly keeps it until Python
releases it: a local variable until it is rebound or its function returns, an argument until the
call returns. `torch.export` runs that Python, so releases are observed during export, by weak
references; the nodes of the graph carry the observations, which `values_held` reads.
"""

import gc
import operator
import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn
from torch._C import _TorchDispatchModeKey
from torch._ops import _get_dispatch_mode_pre_dispatch
from torch.autograd.graph import saved_tensors_hooks
from torch.export import ExportedProgram
from torch.fx.experimental.proxy_tensor import (
    ProxyTorchDispatchMode,
    get_proxy_slot,
    track_tensor_tree,
)
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from fxpart.capture.calls import storage_key
from fxpart.capture.inference.attention_layout import lay_out_as_fused, unfused_if_asked
from fxpart.capture.inference.inner_gradients import (
    SavedResults,
    decomposed_as_by_autograd,
    set_gradients,
)
from fxpart.core.graph import IntArray, OpGraph

__all__ = [
    "ATTACHED",
    "BACKWARD_CALLED",
    "CALL",
    "HELD",
    "LEAF",
    "NO_CALL",
    "TO_THE_END",
    "positions_held",
    "takes_gradients",
    "values_held",
    "watched_export",
]

CALL = "fxpart_call"
"""Key of a node's ``meta``: the index, in Python's order, of the torch call that returned the
node's result or results. Nodes inside a torch function written in Python have none, and those of a
backward, which Python does not call, have `NO_CALL`."""
HELD = "fxpart_held"
"""Key of a node's ``meta``: for each tensor received by Python as the node's result, the number of
calls made when Python released it; shared by copies of the node. In a training step also when what
autograd saved was released."""
ATTACHED = "fxpart_attached"
"""Key of a node's ``meta``: those of `HELD` of tensors that hold what their gradient needs, as
detached ones do not."""
LEAF = "fxpart_leaf"
"""Key of a node's ``meta``, in models that take gradients inside their forward: the model's code
makes the node's result require a gradient."""
BACKWARD_CALLED = "backward() is called inside the forward"
"""Message of the error raised in a model that adds to the ``.grad`` of tensors in its forward."""
NO_CALL = -1
TO_THE_END = 2**62
"""In `HELD`: until the end of the forward."""
FOREVER = TO_THE_END + 1
"""In `HELD`: beyond the end of the forward, as by an attribute of a module."""

_TAKES_GRADIENTS = "fxpart_takes_gradients"


def watched_export(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    dynamic_shapes: Any,  # noqa: ANN401 - as torch.export takes it
) -> ExportedProgram:
    """Return `module` exported, with `CALL` and `HELD` set on the nodes of its program.

    Tensors released by Python must really be freed, so autograd is kept from saving tensors for a
    backward, which an export does not run. A model that takes gradients inside its forward does run
    one: it is exported again, with what autograd saves, which a run holds as well.
    """
    export = partial(torch.export.export, module, args, kwargs, strict=False)
    export = partial(export, dynamic_shapes=dynamic_shapes)
    watch = _Watch(gradients=False)
    try:
        with watch.on(module), saved_tensors_hooks(weakref.ref, lambda saved: saved()):
            program = export()
    except Exception:
        if not watch.differentiates:
            raise
    if not watch.differentiates:
        return program
    with _Watch(gradients=True).on(module), decomposed_as_by_autograd():
        program = export()
    program.graph_module.meta[_TAKES_GRADIENTS] = True
    return program


def takes_gradients(program: ExportedProgram) -> bool:
    """Return whether the model, exported by `watched_export`, takes gradients in its forward."""
    return _TAKES_GRADIENTS in program.graph_module.meta


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


_REQUIRING = (Tensor.requires_grad_, Tensor.requires_grad.__set__)  # type: ignore[attr-defined]


class _InnerGradientError(Exception):
    """The model takes gradients inside its forward."""


_DETACHING = (Tensor.detach, torch.detach, Tensor.data.__get__)  # type: ignore[attr-defined]
"""Calls that return their tensor without its gradient."""


def _memory(tensor: Tensor) -> int:
    """Return a number identifying the storage of a live tensor, or the tensor if it has none."""
    try:
        return storage_key(tensor)
    except NotImplementedError:  # torch.func wraps tensors
        return -id(tensor)


def _referred_to(tensors: list[Tensor]) -> set[int]:
    """Return the ids of those `tensors` that Python's objects refer to, not only views."""
    if not tensors:
        return set()
    referrers = [other for other in gc.get_referrers(*tensors) if other is not tensors]
    referents = {id(referent) for other in referrers for referent in gc.get_referents(other)}
    return referents & {id(tensor) for tensor in tensors}


def _add(releases: tuple[list[int], ...], release: int) -> None:
    for of_key in releases:
        of_key.append(release)


class _Watch(TorchFunctionMode):
    """Records in the nodes of a graph being traced when Python receives and releases tensors."""

    def __init__(self, *, gradients: bool) -> None:
        super().__init__()
        self.differentiates = False
        """Whether the model was stopped because it takes gradients inside its forward."""
        self._saved = SavedResults(self._see) if gradients else None
        """Traces these gradients; None to stop at the first one."""
        self._trains = torch.is_grad_enabled()
        self._calls = 0
        # A callback only runs while its weak reference is alive.
        self._seen: list[tuple[weakref.ref[Tensor], tuple[list[int], ...]]] = []

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,  # noqa: ANN401 - as torch calls it
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        if func is torch.autograd.grad and self._saved is None:
            self.differentiates = True
            raise _InnerGradientError
        if func in (Tensor.backward, torch.autograd.backward):
            raise RuntimeError(BACKWARD_CALLED)
        func = unfused_if_asked(func)
        call = partial(func, *args, **(kwargs or {}))
        mode = _get_dispatch_mode_pre_dispatch(_TorchDispatchModeKey.PROXY)  # type: ignore[no-untyped-call]
        if not isinstance(mode, ProxyTorchDispatchMode):
            return call()
        if self._saved is not None:
            with self._saved.tracing(mode):
                return self._with_gradients(mode, call)
        result = call()
        if lay_out_as_fused(func, args, kwargs or {}, result):
            # Sets the meta of its node again, and traces symbolic strides.
            proxy = get_proxy_slot(result, mode.tracer).proxy
            track_tensor_tree(result, proxy, constant=None, tracer=mode.tracer)
        self._calls += 1
        for leaf in tree_leaves(result):
            slot = get_proxy_slot(leaf, mode.tracer, None) if isinstance(leaf, Tensor) else None
            if slot is not None:
                self._see(leaf, slot.proxy.node, self._calls)
        if func in _DETACHING:
            # An export drops the call; its result shares memory with its operand, which is held.
            operand = args[0] if args else (kwargs or {})["input"]
            slot = get_proxy_slot(operand, mode.tracer, None)
            if slot is not None:
                self._see(result, slot.proxy.node, self._calls, is_attached=False)
        return result

    @contextmanager
    def on(self, module: nn.Module) -> Iterator[None]:
        """Watch a call of `module` inside the block."""
        # The end of its forward, before the export restores its attributes.
        hook = module.register_forward_hook(lambda _module, _args, result: self._end(result))
        try:
            with self:
                yield
        finally:
            hook.remove()

    def _end(self, result: object) -> None:
        """Record that whatever Python still holds after the forward stays, as an attribute does.

        Its result is the caller's. With gradients inside the forward, what the result's graph saved
        is held as well, and cannot be told apart.
        """
        if self._saved is not None:
            return
        leaves = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        returned, memory = {id(leaf) for leaf in leaves}, {_memory(leaf) for leaf in leaves}
        # A view holds what it was made from, whether or not Python does.
        held, shared = set[int](), list[Tensor]()
        tensor: Tensor | None = None
        for ref, _ in self._seen:
            tensor = ref()
            if tensor is None or id(tensor) in returned:
                continue
            if _memory(tensor) in memory:
                shared.append(tensor)
            else:
                held.add(id(tensor))
        del tensor  # else it might count as a referrer
        held |= _referred_to(shared)
        for ref, releases in self._seen:
            tensor = ref()
            if tensor is not None and id(tensor) in held:
                _add(releases, FOREVER)

    def _with_gradients(self, mode: ProxyTorchDispatchMode, call: partial[Any]) -> Any:  # noqa: ANN401
        """Return the result of a call that a gradient may be taken of, or that takes one."""
        if self._trains and call.func is torch.autograd.grad:
            with set_gradients(mode, enabled=call.keywords["create_graph"]):
                return call()
        if not self._trains and call.func is torch._C._set_grad_enabled:
            # Without a training step a region with gradients is like its surroundings.
            last = next(iter(reversed(mode.tracer.graph.nodes)))
            if last.target is call.func:
                mode.tracer.graph.erase_node(last)
        result = call()
        if call.func in _REQUIRING:
            tensor = call.args[0]
            slot = get_proxy_slot(tensor, mode.tracer, None)
            if slot is not None and tensor.is_leaf:
                slot.proxy.node.meta[LEAF] = tensor.requires_grad
        return result

    def _see(self, tensor: Tensor, node: fx.Node, call: int, *, is_attached: bool = True) -> None:
        """Record that Python, or autograd, received a tensor from a call."""
        node.meta.setdefault(CALL, call)
        if node.target is operator.getitem:  # of several results of one call
            node.all_input_nodes[0].meta.setdefault(CALL, call)
        keys = (HELD, ATTACHED) if is_attached else (HELD,)
        releases = tuple(node.meta.setdefault(key, []) for key in keys)
        seen = weakref.ref(tensor, lambda _: _add(releases, self._count()))
        self._seen.append((seen, releases))

    def _count(self) -> int:
        """Return the number of calls made."""
        return self._calls if self._saved is None else self._saved.calls
