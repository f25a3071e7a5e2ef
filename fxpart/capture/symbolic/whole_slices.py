"""`drop_whole_slices`: remove slices of whole tensors, which a capture of definite sizes lacks.

Indexing such as ``x[:, :n]`` makes no slice where the size is known to be n, as when the model
really runs. Where the size is a symbol the slice is recorded, and its backward would copy the whole
gradient.
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
    before = source.meta.get("val") if isinstance(source, fx.Node) else None
    after = node.meta.get("val")
    if not isinstance(before, Tensor) or not isinstance(after, Tensor):
        return False
    # A slice of the same length begins at 0 and has a step of 1.
    return all(_is_same(a, b) for a, b in zip(before.shape, after.shape, strict=True))


def _is_same(a: int | SymInt, b: int | SymInt) -> bool:
    """Return whether two sizes are equal, without a guard on a symbol."""
    if isinstance(a, SymInt) and isinstance(b, SymInt):
        return bool(a.node.expr == b.node.expr)
    return not isinstance(a, SymInt) and not isinstance(b, SymInt) and a == b
