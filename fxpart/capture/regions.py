"""Regions: calls of a graph of its own, under `torch.no_grad` or autocast."""

import torch
from torch import fx

__all__ = ["REGIONS", "body_of"]

REGIONS = (
    torch.ops.higher_order.wrap_with_set_grad_enabled,
    torch.ops.higher_order.wrap_with_autocast,
)
"""What calls a region."""


def body_of(node: fx.Node) -> fx.GraphModule:
    """Return the graph that `node`, which gets it as an attribute, hands to the call of a region.

    Raises:
        TypeError: for another attribute; captures refuse programs that have any.

    """
    owner = node.graph.owning_module
    found = owner.get_submodule(str(node.target)) if owner is not None else None
    if not isinstance(found, fx.GraphModule):
        raise TypeError(f"{node.name} is no region")
    return found
