"""Rename what nodes of an fx graph call."""

from torch.fx import GraphModule
from torch.fx.node import Target

__all__ = ["replace_target_nodes_with"]


def replace_target_nodes_with(
    fx_module: GraphModule,
    old_op: str,
    old_target: Target,
    new_op: str,
    new_target: Target,
) -> None:
    """Let each node with `old_op` and `old_target` do `new_op` on `new_target` instead.

    The nodes stay the same objects, with their arguments, names and metadata.
    """
    for node in fx_module.graph.nodes:
        if node.op == old_op and node.target == old_target:
            node.op, node.target = new_op, new_target
    fx_module.recompile()
