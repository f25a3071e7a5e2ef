"""The partitions of an emitted module, and what passes between them."""

from torch.fx import GraphModule, Node

from fxpart.partitioner.partition import Partition

__all__ = ["DAG", "DAGNode", "dag_of"]


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
