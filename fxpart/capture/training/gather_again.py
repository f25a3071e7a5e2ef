"""`gather_again`: repeat a forward's gathers for its backward instead of keeping their results.

With sequence parallelism Megatron-LM saves each device's piece and gathers it again when a weight
gradient needs the full sequence (Korthikanti et al., arXiv:2205.05198, section 4.2.2). A
checkpointed block reruns its forward, which gathers and saves pieces as the first run did.
"""

from torch import fx

from fxpart.capture.training.checkpointing import StepNodes, compute_again
from fxpart.capture.training.joint_labels import FORWARD, ORDER
from fxpart.sharding.collectives import IN_ORDER

__all__ = ["gather_again"]


_GATHERS = ("fxpart::all_gather.again", "fxpart::all_gather.context")


def gather_again(graph: fx.Graph) -> None:
    """Change a training step to repeat gathers of sequences in the backward."""
    gathers = [
        node
        for node in graph.nodes
        if _name(node) in _GATHERS and (_is_forward(node) or _is_recomputed(node))
    ]
    if not gathers:
        return
    nodes = StepNodes(graph, ())
    for gather in gathers:
        _repeat(graph, nodes, gather)
    graph.lint()


def _name(node: fx.Node) -> str:
    return str(getattr(node.target, "name", str)())


def _is_forward(node: fx.Node) -> bool:
    return node.meta.get(FORWARD) is None


def _is_recomputed(node: fx.Node) -> bool:
    """Return whether a node is part of a checkpointed block's recomputation."""
    return not _is_forward(node) and node.meta[FORWARD] == node.meta[ORDER]


def _is_later(reader: fx.Node, gather: fx.Node) -> bool:
    """Return whether `reader` runs after the end of the forward containing `gather`."""
    if _is_forward(gather):
        return not _is_forward(reader)
    return not _is_recomputed(reader)


def _repeat(graph: fx.Graph, nodes: StepNodes, gather: fx.Node) -> None:
    gathered = set(nodes.storages(gather))
    for reader in gather.users:
        if _name(reader) == IN_ORDER:
            gathered.update(nodes.storages(reader))
    # The gather, its copy in sequence order, and views of their results.
    parts = [
        node
        for node in nodes.position
        if node.op == "call_function"
        and (_is_forward(node) or _is_recomputed(node))
        and not gathered.isdisjoint(nodes.storages(node))
    ]
    readers = {
        user
        for node in parts
        for user in node.users
        if user.op == "call_function" and _is_later(user, gather)
    }
    if not readers:
        return
    first = min(readers, key=nodes.position.__getitem__)
    copies = compute_again(graph, nodes.mode, parts, before=first, readers=readers, block=None)
    for copy in reversed(copies):
        if not copy.users:
            graph.erase_node(copy)
