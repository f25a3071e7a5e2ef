"""Calls of `torch.utils.checkpoint` in a model's own forward, found while it is exported.

`torch.export` runs a checkpointed function like any other, so that a step would keep what the
model recomputes; with ``use_reentrant=True`` it also drops the function's backward. Here each call
is exported as its function, and its nodes are labelled, to be recomputed by `checkpoint_blocks`.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import fx
from torch._C import _TorchDispatchModeKey
from torch._ops import _get_dispatch_mode_pre_dispatch
from torch.autograd.graph import saved_tensors_hooks
from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode
from torch.utils import checkpoint

from fxpart.capture.training.checkpointing import WHOLE
from fxpart.errors import CaptureError

__all__ = ["calls_checkpoint", "checkpointed_calls", "label_checkpoints"]

_CALL = "fxpart_checkpoint"
"""Key of a node's ``meta``: the path made for the outermost call of `checkpoint` around it."""


class _Calls:
    """Labels the nodes traced in each call."""

    def __init__(self) -> None:
        self._count = 0
        self._depth = 0

    @contextmanager
    def labelled(self, prefix: str = "") -> Iterator[None]:
        """Label the nodes traced in the block, unless it is inside another one."""
        mode = _get_dispatch_mode_pre_dispatch(_TorchDispatchModeKey.PROXY)  # type: ignore[no-untyped-call]
        if not isinstance(mode, ProxyTorchDispatchMode) or self._depth:
            yield
            return
        nodes = mode.tracer.graph.nodes
        before = next(iter(reversed(nodes)), None)
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
        for node in reversed(nodes):
            if node is before:
                break
            node.meta[_CALL] = f"{prefix}checkpoint call {self._count}"
        self._count += 1


@contextmanager
def checkpointed_calls() -> Iterator[None]:
    """Export every call of `torch.utils.checkpoint.checkpoint` in the block as its function.

    Models bind that function before they are exported, so what it calls is replaced.

    Raises:
        CaptureError: if a call selects what it recomputes (``context_fn``), or the model enters
            `saved_tensors_hooks`, such as `save_on_cpu`.

    """
    calls = _Calls()

    def enter(hooks: object) -> None:
        raise CaptureError(
            f"it enters torch.autograd.graph.{type(hooks).__name__}, which changes what a step"
            " keeps, and a capture does not see; turn that off in the model"
        )

    class Reentrant:
        """Stands in for torch's Function of ``use_reentrant=True``."""

        @staticmethod
        def apply(function: Callable[..., Any], _preserve: bool, *args: Any) -> Any:  # noqa: ANN401
            with calls.labelled(WHOLE):
                return function(*args)

    def around(_function: object, _preserve: bool, context_fn: object, *_: Any, **__: Any) -> Any:  # noqa: ANN401
        if context_fn is not checkpoint.noop_context_fn:
            raise CaptureError(
                "it calls torch.utils.checkpoint with a context_fn, which selects what is"
                " recomputed; turn that off in the model and set checkpointing=selective"
            )
        with calls.labelled():
            yield

    with ExitStack() as stack:
        for owner, name, replacement in (
            (checkpoint, "CheckpointFunction", Reentrant),
            (checkpoint, "_checkpoint_without_reentrant_generator", around),
            (saved_tensors_hooks, "__enter__", enter),
        ):
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
