"""Cut an fx module into one submodule for each partition."""

from collections.abc import Mapping

from torch.fx import GraphModule, Node

from fxpart.split.cut import Partitions, cut_module
from fxpart.split.dependencies import PLACELESS
from fxpart.split.guards import is_guard

__all__ = ["emit"]


def emit(fx_module: GraphModule, node_to_partition: Mapping[Node, int]) -> GraphModule:
    """Return a module with a child ``submod_<id>`` for each partition id.

    It takes and returns what `fx_module` does, nested inputs and outputs included. The check of the
    inputs of an exported module stays in front of the partitions. `fx_module` itself keeps its
    graph.

    Raises:
        CycleError: when partitions wait for each other; see `fxpart.split.split_module`.

    """
    id_of = {
        node: node_to_partition[node]
        for node in fx_module.graph.nodes
        if node.op not in PLACELESS and not is_guard(node)
    }
    ids = list(dict.fromkeys(id_of.values()))
    number = {one: index for index, one in enumerate(ids)}
    partitions = Partitions([f"submod_{one}" for one in ids], ids, by_number=False)
    return cut_module(fx_module, {node: number[one] for node, one in id_of.items()}, partitions)
