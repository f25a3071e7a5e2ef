"""Calls of `torch.utils.checkpoint` in a model's own forward, found while it is exported.

`torch.export` runs a checkpointed function like any other, so that a step would keep what the
model recomputes; with ``use_reentrant=True`` it also drops the function's backward. Here each call
is exported as its function, and its nodes are labelled, to be recomputed by `checkpoint_blocks`.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, fx
from torch._C import _TorchDispatchModeKey
from torch._ops import _get_dispatch_mode_pre_dispatch
from torch.autograd.graph import saved_tensors_hooks
from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode
from torch.utils import checkpoint

from fxpart.capture.training.checkpointing import WHOLE
from fxpart.errors import CaptureError

__all__ = ["calls_checkpoint", "checkpointed_calls", "label_checkpoints"]

_CALL = "fxpart_checkpoint"
"""Key of a node's ``meta``: the path made for the call of `checkpoint` around it."""


def _proxy_mode() -> ProxyTorchDispatchMode | None:
    """Return the mode in which this thread is exporting a model, if it is."""
    mode = _get_dispatch_mode_pre_dispatch(_TorchDispatchModeKey.PROXY)  # type: ignore[no-untyped-call]
    return mode if isinstance(mode, ProxyTorchDispatchMode) else None


class _Calls:
    """Stand-ins for what `checkpoint` calls, which label the nodes traced in each call."""

    def __init__(self) -> None:
        self._count = 0
        self._is_inside = False

    @contextmanager
    def _labelled(self, prefix: str = "") -> Iterator[None]:
        """Label the nodes traced in the block."""
        mode = _proxy_mode()
        if mode is None:
            yield
            return
        if self._is_inside:
            raise CaptureError(
                "it nests calls of torch.utils.checkpoint, of which a captured step can recompute"
                " one level; turn the inner ones off in the model"
            )
        nodes = mode.tracer.graph.nodes
        before = next(iter(reversed(nodes)), None)
        self._is_inside = True
        try:
            yield
        finally:
            self._is_inside = False
        for node in reversed(nodes):
            if node is before:
                break
            node.meta[_CALL] = f"{prefix}checkpoint call {self._count}"
        self._count += 1

    def apply(self, function: Callable[..., Any], _preserve: bool, *args: Any) -> Any:  # noqa: ANN401
        """Stand in for `CheckpointFunction.apply`, the call with ``use_reentrant=True``."""
        # Without an argument that needs a gradient, that Function has no backward.
        needs = any(isinstance(arg, Tensor) and arg.requires_grad for arg in args)
        with self._labelled(WHOLE), nullcontext() if needs else torch.no_grad():
            return function(*args)

    def around(
        self,
        _function: object,
        _preserve: bool,
        context_fn: object,
        *_: Any,  # noqa: ANN401 - as torch calls it
        **__: Any,  # noqa: ANN401
    ) -> Iterator[None]:
        """Stand in for the generator around a call with ``use_reentrant=False``."""
        if context_fn is not checkpoint.noop_context_fn:
            raise CaptureError(
                "it calls torch.utils.checkpoint with a context_fn, which selects what is"
                " recomputed; turn that off in the model and set checkpointing=selective"
            )
        with self._labelled():
            yield


@contextmanager
def checkpointed_calls() -> Iterator[None]:
    """Export every call of `torch.utils.checkpoint.checkpoint` in the block as its function.

    Models bind that function before they are exported, so what it calls is replaced. Not
    thread-safe.

    Raises:
        CaptureError: if a call selects what it recomputes (``context_fn``) or is inside another, or
            the model enters `saved_tensors_hooks`, such as `save_on_cpu`.

    """
    calls = _Calls()
    enter_hooks = saved_tensors_hooks.__enter__

    def enter(hooks: saved_tensors_hooks) -> None:
        if _proxy_mode() is None:
            enter_hooks(hooks)
            return
        raise CaptureError(
            f"it enters torch.autograd.graph.{type(hooks).__name__}, which changes what a step"
            " keeps, and a capture does not see; turn that off in the model"
        )

    with ExitStack() as stack:
        for owner, name, replacement in (
            (checkpoint, "CheckpointFunction", calls),
            (checkpoint, "_checkpoint_without_reentrant_generator", calls.around),
            (saved_tensors_hooks, "__enter__", enter),
        ):
            # A version of torch without the private name only hides the calls that use it.
            if hasattr(owner, name):
                stack.callback(setattr, owner, name, getattr(owner, name))
                setattr(owner, name, replacement)
        yield


def label_checkpoints(module: fx.GraphModule) -> tuple[str, ...]:
    """Enter each call of `checkpoint` into its nodes' module stacks; return its paths there."""
    paths: dict[str, None] = {}
    for graph in (m.graph for m in module.modules() if isinstance(m, fx.GraphModule)):
        for node in graph.nodes:
            path = node.meta.get(_CALL)
            if path is not None:
                stack = node.meta.get("nn_module_stack") or {}
                # Outermost, so that a node keeps the path of its own module.
                node.meta["nn_module_stack"] = {path: (path, "torch.utils.checkpoint"), **stack}
                paths[path] = None
    return tuple(paths)


def calls_checkpoint(module: fx.GraphModule) -> bool:
    """Return whether an exported model calls `checkpoint` itself."""
    graphs = (m.graph for m in module.modules() if isinstance(m, fx.GraphModule))
    return any(_CALL in node.meta for graph in graphs for node in graph.nodes)
