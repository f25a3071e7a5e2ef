"""Parents, children, order and levels of partitions; and replacement of node targets."""

from collections.abc import Sequence

from torch.fx import GraphModule, Node
from torch.fx.node import Target

from fxpart.errors import CycleError
from fxpart.torch_compat.partitioner.config import ConfigError
from fxpart.torch_compat.partitioner.partition import OrderedSet, Partition

__all__ = [
    "check_dependency",
    "combine_two_partitions",
    "get_bfs_level_partition",
    "get_node_to_partition_mapping",
    "reorganize_partitions",
    "replace_target_nodes_with",
    "reset_partition_device",
    "running_order",
    "set_parents_and_children",
]


def get_node_to_partition_mapping(partitions: Sequence[Partition]) -> dict[Node, int]:
    """Return the partition id of each node, the last one for a node in several partitions."""
    return {node: p.partition_id for p in partitions for node in p.nodes}


def set_parents_and_children(partitions: Sequence[Partition]) -> None:
    """Set ``parents`` and ``children``: a child reads a parent's node that it lacks."""
    holders: dict[Node, list[Partition]] = {}
    for partition in partitions:
        partition.parents, partition.children = OrderedSet(), OrderedSet()
        for node in partition.nodes:
            holders.setdefault(node, []).append(partition)
    # From the reader's side: a source has many readers but is in each reading partition, so the
    # partitions that contain it matter only to one that does not.
    for child in partitions:
        for node in child.nodes:
            for operand in node.all_input_nodes:
                if operand not in child.nodes:
                    for parent in holders.get(operand, ()):
                        parent.children.add(child)
                        child.parents.add(parent)


def reorganize_partitions(partitions: Sequence[Partition]) -> None:
    """Set ``partition_id`` to the index in the list, and set ``parents`` and ``children``."""
    for index, partition in enumerate(partitions):
        partition.partition_id = index
    set_parents_and_children(partitions)


def reset_partition_device(partitions: Sequence[Partition]) -> None:
    """Remove the devices of all partitions."""
    for partition in partitions:
        partition.logical_device_ids = []


def combine_two_partitions(
    partition_0: Partition, partition_1: Partition, partitions: list[Partition]
) -> None:
    """Replace two of `partitions` by their union, at the end of the list.

    It has no device; ids, ``parents`` and ``children`` of all are updated.

    Raises:
        ConfigError: if they are not two distinct members of the list, which is left unchanged.

    """
    if partition_0 is partition_1 or not {partition_0, partition_1} <= set(partitions):
        raise ConfigError(
            f"partitions {partition_0} and {partition_1} are not two of the"
            f" {len(partitions)} given; take both from that list"
        )
    joined = Partition(len(partitions))
    joined.nodes = OrderedSet((*partition_0.nodes, *partition_1.nodes))
    joined.recalculate_mem_size()
    partitions.append(joined)
    partitions.remove(partition_0)
    partitions.remove(partition_1)
    reorganize_partitions(partitions)


def running_order(partitions: Sequence[Partition]) -> list[Partition]:
    """Return the partitions in a topological order.

    Raises:
        CycleError: if partitions wait for each other; the message names a cycle.

    """
    waits = {p: len(p.parents) for p in partitions}
    order = [p for p in partitions if waits[p] == 0]
    for partition in order:
        for child in partition.children:
            waits[child] -= 1
            if waits[child] == 0:
                order.append(child)
    if len(order) == len(partitions):
        return order
    raise CycleError(_circle_message([p for p in partitions if waits[p] > 0]))


def _circle_message(waiting: Sequence[Partition]) -> str:
    """Return the message naming one cycle among partitions that wait for each other."""
    # Imported only for the message, since it takes half a second.
    import networkx

    among = set(waiting)
    edges = [(p, parent) for p in waiting for parent in p.parents if parent in among]
    cycle = networkx.find_cycle(networkx.DiGraph(edges), waiting[0])
    circle = [str(p.partition_id) for p in (cycle[0][0], *(parent for _, parent in cycle))][::-1]
    shown = circle if len(circle) <= 9 else [*circle[:8], "...", circle[-1]]
    return (
        f"partitions {' -> '.join(shown)} wait for each other's results;"
        " move the operators between them into one partition"
    )


def get_bfs_level_partition(partitions: Sequence[Partition]) -> None:
    """Set ``bfs_level`` to the longest path from a partition without parents.

    Raises:
        CycleError: if partitions wait for each other.

    """
    order = running_order(partitions)
    for partition in order:
        partition.bfs_level = 0
    for partition in order:
        for child in partition.children:
            child.bfs_level = max(child.bfs_level, partition.bfs_level + 1)


def check_dependency(partition: Partition) -> bool:
    """Return whether `partition` waits for itself through its children."""
    visited = {partition}
    queue = [partition]
    while queue:
        for child in queue.pop().children:
            if child is partition:
                return True
            if child not in visited:
                visited.add(child)
                queue.append(child)
    return False


def replace_target_nodes_with(
    fx_module: GraphModule,
    old_op: str,
    old_target: Target,
    new_op: str,
    new_target: Target,
) -> None:
    """Replace `old_op` and `old_target` of nodes by `new_op` and `new_target`.

    The nodes remain the same objects with the same arguments, names and metadata.
    """
    for node in fx_module.graph.nodes:
        if node.op == old_op and node.target == old_target:
            node.op, node.target = new_op, new_target
    fx_module.recompile()
