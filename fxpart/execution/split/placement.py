"""`split_by_assignment`: cut a captured module according to a plan."""

from torch.fx import GraphModule, Node

from fxpart.core.assignment import Assignment
from fxpart.core.graph import OpGraph
from fxpart.errors import SpecError, nearest_names
from fxpart.execution.split.cut import Partitions, cut_module
from fxpart.execution.split.dependencies import PLACELESS
from fxpart.execution.split.graph_module import is_guard

__all__ = ["split_by_assignment"]


def split_by_assignment(
    graph_module: GraphModule, graph: OpGraph, assignment: Assignment
) -> GraphModule:
    """Return a module with a child ``submod_<p>`` for each partition of a plan, in that order.

    It has the signature of `graph_module` and computes the same. The input check of an exported
    module runs before the partitions. An operator that is only in the module, such as the write of
    a buffer, goes into the last partition it reads from.

    Args:
        graph_module: ``Capture.graph_module`` or ``ExportedProgram.module()``, whose call nodes
            are named like the operators in `graph`.
        graph: its n operators as arrays.
        assignment: partition of each of the n operators.

    Raises:
        SpecError: if the module, the graph and the plan are not from one capture.
        CycleError: if partitions wait for each other, as in `split_module`.

    """
    assignment.check_for(graph.n_ops)
    placed = dict(zip(graph.names, assignment.partition_of.tolist(), strict=True))
    part_of: dict[Node, int] = {}
    n_placed = 0
    for node in graph_module.graph.nodes:
        if node.op in PLACELESS or is_guard(node):
            continue
        part = placed.get(node.name)
        n_placed += part is not None
        makers = (part_of.get(operand, 0) for operand in node.all_input_nodes)
        part_of[node] = max(makers, default=0) if part is None else part
    if n_placed < graph.n_ops:
        names = [node.name for node in graph_module.graph.nodes]
        missing = next(name for name in graph.names if name not in set(names))
        raise SpecError(
            f"the plan places operator {missing}, which the module does not have;"
            f" {nearest_names(missing, names)}; give the module that the graph was captured from"
        )
    ids = range(assignment.n_partitions)
    children = [f"submod_{part}" for part in ids]
    return cut_module(graph_module, part_of, Partitions(children, ids, by_number=True))
