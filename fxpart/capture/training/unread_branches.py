"""`hold_saved`: what autograd saves in a forward for gradients that its loss does not need.

A model may compute what its loss does not depend on, such as a second result. Autograd saves
tensors there as everywhere, and frees them with the last tensor of the branch: a result of the
model once its loss is computed.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, fx
from torch.autograd.graph import Node
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot
from torch.utils._pytree import tree_leaves

from fxpart.capture.inference.eager_lifetimes import HELD

__all__ = ["Branch", "hold_saved"]

Branch = tuple[Node, Sequence[int]]
"""What computed a tensor, and when Python released that, see `HELD`."""


def hold_saved(loss: Tensor, branches: Sequence[Branch]) -> None:
    """Add to the nodes of saved tensors, in `HELD`, when those of `branches` were released.

    Args:
        loss: the loss, being traced; what its own gradient needs is left to the backward.
        branches: for the tensors of the forward in order, as they were computed.

    """
    mode = get_proxy_mode()
    assert mode is not None, "make_fx runs a step in its own mode"
    reached = set[Node]()
    if loss.grad_fn is not None:
        list(_reached(loss.grad_fn, reached))
    # From the last release, so that each function is reached first by what holds it longest.
    for function, releases in sorted(branches, key=lambda branch: -max(branch[1])):
        for unread in _reached(function, reached):
            for tensor in _saved(unread):
                slot = get_proxy_slot(tensor, mode.tracer, None)
                if slot is not None:
                    held: list[int] = _maker(slot.proxy.node).meta.setdefault(HELD, [])
                    held.append(max(releases))


def _reached(function: Node, known: set[Node]) -> Iterator[Node]:
    """Yield `function` and what it follows in autograd's graph, but for `known`; add them there."""
    remaining = [function]
    while remaining:
        reached = remaining.pop()
        if reached not in known:
            known.add(reached)
            yield reached
            remaining += [before for before, _ in reached.next_functions if before is not None]


def _saved(function: Node) -> Iterator[Tensor]:
    """Yield the tensors that autograd has saved for the gradient of one call."""
    # Raw, since what is saved may have been overwritten meanwhile.
    names = [name for name in dir(function) if name.startswith(("_raw_saved_", "saved_tensors"))]
    for leaf in tree_leaves([getattr(function, name) for name in names]):
        tensor = leaf if isinstance(leaf, Tensor) else getattr(leaf, "data", None)
        if isinstance(tensor, Tensor):
            yield tensor


def _maker(node: fx.Node) -> fx.Node:
    """Return the node of the tensor itself: autograd saves a result as a detached copy."""
    while node.target is torch.ops.aten.detach.default:
        node = node.all_input_nodes[0]
    return node
