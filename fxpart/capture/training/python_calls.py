"""Lifetimes of the tensors inside users' `torch.autograd.Function`s, whose code is Python.

A call of torch frees a value that it computes after its last reader. Python keeps it until a local
variable is rebound or the function returns; a context, or a graph of the Function's own
(`torch.enable_grad`), until a backward that may be much later.
"""

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fxpart.capture.calls import storage_key

__all__ = ["PythonCalls"]


@dataclass(eq=False, slots=True)
class _Seen:
    """A tensor that a function made."""

    owner: fx.Node
    """The node that allocated its storage."""
    tensor: weakref.ref[Tensor] | None = None
    """Kept, since a callback only runs while its weak reference is alive."""
    is_result: bool = False


class PythonCalls(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Finds the last node traced before a tensor made inside a user's function is released.

    Tensors are watched if they are made between `begin` and `end`. Of arguments and results, which
    their caller releases, it only finds those that a context holds to the end.
    """

    def __init__(self, graph: fx.Graph) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.last: dict[fx.Node, fx.Node] = {}
        """The last node traced before the result of a watched node was released, at least itself.
        The results of a function belong to its caller."""
        self._graph = graph
        self._watching = False
        self._seen: list[_Seen] = []
        self._begun = 0
        """Number of tensors seen before the function that is running."""
        self._alive: dict[int, list[_Seen]] = {}
        """The tensors that are alive, by storage."""
        self._arguments: list[tuple[weakref.ref[Tensor], fx.Node]] = []

    def begin(self, arguments: object = ()) -> None:
        """Watch the tensors that a function makes from here on, and its `arguments`."""
        self._watching, self._begun = True, len(self._seen)
        for argument in tree_leaves(arguments):
            node = _node_of(argument)
            if node is not None:
                self._arguments.append((weakref.ref(argument), node))

    def end(self, results: object) -> None:
        """Stop watching, also the `results` of the function."""
        self._watching = False
        leaves = {id(leaf) for leaf in tree_leaves(results)}
        for seen in self._seen[self._begun :]:
            seen.is_result = seen.tensor is not None and id(seen.tensor()) in leaves

    def hold_to_the_end(self) -> None:
        """Record that what contexts still hold, which the loss keeps, lives to the last node."""
        watched = [(seen.tensor, seen.owner) for seen in self._seen] + self._arguments
        for tensor, node in watched:
            if tensor is not None and tensor() is not None:
                self.last[node] = next(iter(reversed(self._graph.nodes)))

    def _release(self, storage: int, seen: _Seen, _: weakref.ref[Tensor]) -> None:
        self._alive[storage].remove(seen)
        if not seen.is_result:
            self.last[seen.owner] = next(iter(reversed(self._graph.nodes)))

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Any,  # noqa: ANN401 - as torch calls it
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result) if self._watching else ():
            node = _node_of(leaf)
            if node is not None:
                self._see(leaf, node)
        return result

    def _see(self, tensor: Tensor, node: fx.Node) -> None:
        self.last.setdefault(node, node)
        storage = storage_key(tensor)
        alive = self._alive.setdefault(storage, [])
        # A view holds the storage that another node allocated, unless that is a result of an
        # earlier function, whose release its caller decides.
        seen = _Seen(alive[0].owner if alive and not alive[0].is_result else node)
        seen.tensor = weakref.ref(tensor, partial(self._release, storage, seen))
        self._seen.append(seen)
        alive.append(seen)


def _node_of(leaf: object) -> fx.Node | None:
    """Return the node of a tensor in the graph that is being traced, if it has one."""
    mode = get_proxy_mode()
    if mode is None or not isinstance(leaf, Tensor):
        return None
    slot = get_proxy_slot(leaf, mode.tracer, None)
    return None if slot is None else slot.proxy.node
