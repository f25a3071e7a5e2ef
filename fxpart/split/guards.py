"""The check of its inputs that an exported module begins with: it is kept, but not placed.

``ExportedProgram.module()`` calls a module ``_guards_fn`` on all inputs and uses no result. It runs
on the host, before any partition.
"""

from torch.fx import Node

__all__ = ["is_guard"]


def is_guard(node: Node) -> bool:
    """Return whether `node` checks the inputs of an exported module."""
    return (
        node.op == "call_module"
        and node.target == "_guards_fn"
        and not node.users
        and all(operand.op == "placeholder" for operand in node.all_input_nodes)
    )
