"""`drop_whole_slices`: remove slices of whole tensors, absent from captures of concrete sizes.

Indexing such as ``x[:, :n]`` creates no slice if the size is known to be n, as in a real run. If
the size is a symbol, the slice is recorded, and its backward would copy the whole gradient.
"""

from torch import SymInt, Tensor, fx, ops
from torch.export import ExportedProgram

__all__ = ["drop_whole_slices"]


def drop_whole_slices(program: ExportedProgram) -> None:
    """Remove slices of whole operands from `program`, regions included, in place.

    Outputs of the program stay, since its signature names them.
    """
    bodies = [body for body in program.graph_module.modules() if isinstance(body, fx.GraphModule)]
    for body in bodies:
        for node in body.graph.find_nodes(op="call_function", target=ops.aten.slice.Tensor):
            if _is_whole(node) and not any(user.op == "output" for user in node.users):
                node.replace_all_uses_with(node.args[0])
                body.graph.erase_node(node)
        body.recompile()


def _is_whole(node: fx.Node) -> bool:
    source = node.args[0]
    operand = source.meta.get("val") if isinstance(source, fx.Node) else None
    result = node.meta.get("val")
    if not isinstance(operand, Tensor) or not isinstance(result, Tensor):
        return False
    # A slice of the same length starts at 0 with step 1.
    return all(_is_same(a, b) for a, b in zip(operand.shape, result.shape, strict=True))


def _is_same(a: int | SymInt, b: int | SymInt) -> bool:
    """Return whether two sizes are equal, without adding a guard on a symbol."""
    if isinstance(a, SymInt) and isinstance(b, SymInt):
        return bool(a.node.expr == b.node.expr)
    return not isinstance(a, SymInt) and not isinstance(b, SymInt) and a == b
