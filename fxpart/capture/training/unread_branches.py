"""`hold_saved`: the lifetimes of what autograd saves for results that the loss does not depend on.

A model may compute more than its loss, such as a second result. Autograd saves tensors for the
gradient of that, too, although no backward asks for it, and frees them once Python has released the
tensors that were computed from them.
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
"""The call that computed a tensor, and when Python released the tensor, as in `HELD`."""


def hold_saved(loss: Tensor, branches: Sequence[Branch]) -> None:
    """Add to `HELD` of saved tensors when Python released the last tensor computed from them.

    Args:
        loss: the loss, being traced; what its own gradient needs is left to the backward.
        branches: those of the tensors that Python received in the forward.

    """
    mode = get_proxy_mode()
    assert mode is not None, "make_fx runs a step in its own mode"
    reached = set[Node]()
    if loss.grad_fn is not None:
        reached.update(_reached(loss.grad_fn, reached))
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
    names = [name for name in dir(function) if name.startswith("_raw_saved_")]
    for saved in tree_leaves([getattr(function, name) for name in names]):
        if isinstance(tensor := getattr(saved, "data", None), Tensor):
            yield tensor


def _maker(node: fx.Node) -> fx.Node:
    """Return the node of the result that `node` is: autograd saves it as a detached tensor."""
    while node.target is torch.ops.aten.detach.default:
        node = node.all_input_nodes[0]
    return node
