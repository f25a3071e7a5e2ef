"""The partitions of an emitted module, and what passes between them."""

from collections.abc import Mapping

from torch.fx import GraphModule, Node

from fxpart.execution.split.cut import Partitions, cut_module
from fxpart.execution.split.dependencies import PLACELESS
from fxpart.execution.split.graph_module import is_guard
from fxpart.torch_compat.partitioner.partition import Partition

__all__ = ["DAG", "DAGNode", "dag_of", "emit"]


class DAGNode:
    """One partition in the emitted module: its call, and what it takes, gives and needs."""

    def __init__(
        self,
        submodule_node: Node,
        input_nodes: list[Node],
        output_nodes: list[Node],
        logical_device_ids: list[int],
        size_bytes: int,
    ) -> None:
        self.submodule_node = submodule_node
        self.input_nodes = input_nodes
        self.output_nodes = output_nodes
        self.logical_device_ids = logical_device_ids
        self.size_bytes = size_bytes

    def __str__(self) -> str:
        return str(self.submodule_node)


class DAG:
    """The partitions in the order in which they run."""

    def __init__(self) -> None:
        self.nodes: list[DAGNode] = []

    def create_node(
        self,
        submodule_node: Node,
        input_nodes: list[Node],
        output_nodes: list[Node],
        logical_devices: list[int],
        size_bytes: int,
    ) -> None:
        """Add a partition at the end."""
        node = DAGNode(submodule_node, input_nodes, output_nodes, logical_devices, size_bytes)
        self.nodes.append(node)


def _outputs(emitted: GraphModule, call: Node) -> list[Node]:
    """Return the nodes that a partition's results are: the items of a tuple, or the call itself."""
    users = list(call.users)
    submodule = emitted.get_submodule(str(call.target))
    assert isinstance(submodule, GraphModule)
    returned = submodule.graph.output_node().args[0]
    # Several results come as a tuple that is taken apart at once. One result may be read by
    # several partitions; and it may be a tuple itself.
    return users if isinstance(returned, (tuple, list)) and users else [call]


def dag_of(emitted: GraphModule, submodules: dict[str, Partition]) -> DAG:
    """Return the DAG of an emitted module; `submodules` says which partition each child is."""
    dag = DAG()
    for node in emitted.graph.nodes:
        partition = submodules.get(str(node.target)) if node.op == "call_module" else None
        if partition is not None:
            dag.create_node(
                node,
                node.all_input_nodes,
                _outputs(emitted, node),
                partition.logical_device_ids,
                partition.used_mem_bytes,
            )
    return dag


# Cut an fx module into one submodule for each partition.


def emit(fx_module: GraphModule, node_to_partition: Mapping[Node, int]) -> GraphModule:
    """Return a module with a child ``submod_<id>`` for each partition id.

    It takes and returns what `fx_module` does, nested inputs and outputs included. The check of the
    inputs of an exported module stays in front of the partitions. `fx_module` itself keeps its
    graph.

    Raises:
        CycleError: when partitions wait for each other; see `fxpart.split_module`.

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
