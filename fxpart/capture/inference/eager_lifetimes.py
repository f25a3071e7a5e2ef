"""`eager_graph`: a captured graph whose values live as long as the module's Python keeps them.

A captured graph frees a value after its last reader. A module that is called eagerly keeps it until
Python releases it: a local variable until it is bound again or its function returns, an argument
until the call returns. `torch.export` runs that Python, so every release is observed then.
"""

import weakref
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import numpy as np
from torch import Tensor, fx, nn
from torch._C import _TorchDispatchModeKey
from torch._ops import _get_dispatch_mode_pre_dispatch
from torch.export import ExportedProgram
from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode, get_proxy_slot
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from fxpart.capture.inference.export import export_program
from fxpart.capture.inference.from_export import op_graph
from fxpart.core.graph import IntArray, OpGraph, csr

__all__ = ["eager_graph", "releases", "watching_python", "with_lifetimes"]

_SEEN = "fxpart_seen"
"""Key of a node's ``meta``: numbers of the tensors that Python received as its result."""
_RELEASED = "fxpart_released"
"""Key of a node's ``meta``: numbers of the tensors that Python released before the next node."""


def eager_graph(
    module: nn.Module, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
) -> OpGraph:
    """Return `module` captured, its values alive as long as in an eager call of the module.

    The operators are those of `fxpart.capture.capture_graph`; some also read values that they do
    not compute with, to keep them alive. That suits the memory of one device: between several, such
    a read would be a transfer. Tensors kept by Python code inside a function of torch, such as
    ``torch.nn.functional.multi_head_attention_forward``, are not observed.

    Raises:
        CaptureError: for a model that cannot be captured.

    """
    with watching_python():
        program = export_program(module, args, kwargs)
    graph = op_graph(program)
    return with_lifetimes(graph, releases(program, graph))


def watching_python() -> AbstractContextManager[object]:
    """Return a context in which to export programs for `releases`."""
    return _Watch()


def releases(program: ExportedProgram, graph: OpGraph) -> IntArray:
    """Return for each value of `graph` the last operator that begins before Python releases it.

    Shape (V,); -1 for a value that Python never receives, or keeps.

    Args:
        program: exported while `watching_python`.
        graph: its operators.

    """
    op_of = {name: op for op, name in enumerate(graph.names)}
    released = {
        number: op_of[node.name]
        for node in program.graph.nodes
        if node.name in op_of
        for number in node.meta.get(_RELEASED, ())
    }
    value_of = {name: value for value, name in enumerate(graph.value_names)}
    last = np.full(graph.n_values, -1, dtype=np.int64)
    for node in program.graph.nodes:
        value = value_of.get(node.name)
        if value is not None:
            ends = [released.get(number, -1) for number in node.meta.get(_SEEN, ())]
            last[value] = max(ends, default=-1)
    return last


def with_lifetimes(graph: OpGraph, last: IntArray) -> OpGraph:
    """Return `graph` with each value also read by operator ``last[value]``, unless that is -1."""
    reads = [graph.reads_of(op).tolist() for op in range(graph.n_ops)]
    for value in np.flatnonzero(last > graph.value_producer).tolist():
        if value not in reads[last[value]]:
            reads[last[value]].append(value)
    starts, items = csr(reads)
    return replace(graph, read_start=starts, reads=items)


class _Watch(TorchFunctionMode):
    """Records which tensors Python receives and releases in the nodes of a graph being traced."""

    def __init__(self) -> None:
        super().__init__()
        # Dead references are kept too, since a tensor's number is its index.
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
            for leaf in tree_leaves(result):
                if isinstance(leaf, Tensor):
                    self._see(leaf, mode)
        return result

    def _see(self, tensor: Tensor, mode: ProxyTorchDispatchMode) -> None:
        """Assign a number to a tensor that has a node in the graph."""
        slot = get_proxy_slot(tensor, mode.tracer, None)
        if slot is None:
            return
        node: fx.Node = slot.proxy.node
        number, graph = len(self._seen), node.graph

        def released(_: object) -> None:
            last = next(iter(reversed(graph.nodes)))
            last.meta.setdefault(_RELEASED, []).append(number)

        node.meta.setdefault(_SEEN, []).append(number)
        self._seen.append(weakref.ref(tensor, released))
