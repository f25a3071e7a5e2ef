"""Bytes in use along a graph: `build_memory_profile`."""

from collections.abc import Callable

from torch import fx

from fxpart.memory.storages import GraphStorages, graph_storages, is_input
from fxpart.memory.tensors import SizeOf

__all__ = ["build_memory_profile", "memory_profile", "releasable_storages"]


def build_memory_profile(
    graph: fx.Graph,
    is_releasable: Callable[[fx.Node], bool],
    size_of: SizeOf | None = None,
) -> list[int]:
    """Return the bytes in use along a run of `graph` in its order.

    The first entry has the inputs (placeholders and attributes, each storage once). Each operator
    adds two: after it has allocated its results, and after what it was the last to need is gone.
    The results of the graph stay. Near-linear in nodes, edges and results.

    Args:
        graph: nodes carry ``meta["val"]``, as an export leaves it.
        is_releasable: whether a storage that this node makes, or brings in as an input, may go
            after its last use. Where several inputs share a storage, all must allow it. Attributes
            are not asked about: their module keeps them.
        size_of: makes a number of bytes that may be symbolic; without it a symbolic size counts as
            at the example inputs.

    Raises:
        CaptureError: for a node without ``meta["val"]``, or a size without a number.

    """
    return memory_profile(graph_storages(graph), is_releasable, size_of)


def memory_profile(
    storages: GraphStorages,
    is_releasable: Callable[[fx.Node], bool],
    size_of: SizeOf | None = None,
) -> list[int]:
    """Return what `build_memory_profile` does, of storages that are known already."""
    sizes = storages.sizes(size_of)
    releasable = releasable_storages(storages.makers, is_releasable)
    steps = list(zip(storages.nodes, storages.made, storages.let_go_by(), strict=True))
    current = sum(sizes[s] for node, made, _ in steps if is_input(node) for s in made)
    profile = [current]
    for node, made, gone in steps:
        if is_input(node) or node.op == "output":
            continue
        current += sum(sizes[s] for s in made)
        profile.append(current)
        current -= sum(sizes[s] for s in gone if releasable[s])
        profile.append(current)
    return profile


def releasable_storages(
    makers: list[list[fx.Node]], is_releasable: Callable[[fx.Node], bool]
) -> list[bool]:
    """Return for each storage whether it may go; `makers` are the nodes that bring it in."""
    return [
        all(node.op != "get_attr" and is_releasable(node) for node in nodes) for nodes in makers
    ]
