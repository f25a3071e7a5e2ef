"""Memory of a forward graph and of the backward graph that runs after it.

The forward returns its results, then values for the backward; the backward takes some of these, and
gradients of the results. A value in both graphs is recognized by its storage or, if a graph was
read from a file, by its node's name.
"""

from dataclasses import dataclass

from torch import fx
from torch.utils._pytree import tree_leaves

from fxpart.errors import CaptureError
from fxpart.torch_compat.memory.profile import memory_profile
from fxpart.torch_compat.memory.storages import GraphStorages, graph_storages, is_input
from fxpart.torch_compat.memory.tensors import SizeOf, hinted_bytes

__all__ = ["get_fwd_bwd_interactions", "get_peak_memory"]


def get_fwd_bwd_interactions(
    fwd_graph: fx.Graph,
    bwd_graph: fx.Graph,
    size_of: SizeOf | None = None,
    *,
    n_results: int = 0,
) -> tuple[int, set[str]]:
    """Return the bytes live throughout the backward, and the inputs it may not release.

    The bytes are those of results, inputs and attributes of the forward that are not inputs of the
    backward. The names are those of inputs of the backward that are inputs of the forward or views
    of them, or that the forward did not return.

    Args:
        fwd_graph: nodes of both graphs have ``meta["val"]``.
        bwd_graph: its inputs have the names or the storages of values that the forward returns.
        size_of: returns the number for a possibly symbolic size in bytes.
        n_results: number of leading outputs of the forward kept by its caller, which the backward
            may not release even if it reads them.

    Raises:
        CaptureError: if a node has no ``meta["val"]``, a size has no number, or the forward has no
            output.

    """
    shared = _interface(graph_storages(fwd_graph), graph_storages(bwd_graph), n_results)
    return shared.resident_bytes(size_of), shared.kept


def get_peak_memory(
    fwd_graph: fx.Graph,
    bwd_graph: fx.Graph,
    size_of: SizeOf | None = None,
    *,
    n_results: int = 0,
) -> int:
    """Return the peak bytes of the forward followed by the backward.

    The inputs of the forward stay to the end. See `get_fwd_bwd_interactions` for the arguments and
    errors.
    """
    forward, backward = graph_storages(fwd_graph), graph_storages(bwd_graph)
    shared = _interface(forward, backward, n_results)
    forward_bytes = memory_profile(forward, lambda node: not is_input(node), size_of)
    backward_bytes = memory_profile(backward, lambda node: node.name not in shared.kept, size_of)
    return max(*forward_bytes, shared.resident_bytes(size_of) + max(backward_bytes))


@dataclass(frozen=True, eq=False, slots=True)
class _Interface:
    """The values that pass from the forward to the backward."""

    forward: GraphStorages
    resident: list[int]
    """Storages of the forward that stay live and are not inputs of the backward."""
    kept: set[str]
    """Names of inputs of the backward that may not be released."""

    def resident_bytes(self, size_of: SizeOf | None) -> int:
        """Return the bytes of `resident`."""
        number_of = size_of or hinted_bytes
        tensors = [self.forward.tensors[storage] for storage in self.resident]
        return sum(number_of(tensor.untyped_storage().nbytes()) for tensor in tensors)


def _interface(forward: GraphStorages, backward: GraphStorages, n_results: int) -> _Interface:
    returned, results = _returned(forward, n_results)
    inputs = [node for node in forward.nodes if is_input(node)]
    owned = dict.fromkeys(forward.storages_of([*inputs, *results]))
    passed = dict.fromkeys(forward.storages_of(returned))
    by_number: dict[int, int] = {}
    for node in [*inputs, *returned]:
        by_number.update(forward.in_storage[forward.position[node]])
    by_name = {node.name: node for node in returned}
    read, unreleasable = set[int](), set[str]()
    for node, numbers in zip(backward.nodes, backward.in_storage, strict=True):
        if not is_input(node):
            continue
        storages = [by_number[number] for number in numbers if number in by_number]
        if not storages and node.name in by_name:
            storages = forward.storages_of([by_name[node.name]])
        read.update(storages)
        if not any(s in passed and s not in owned for s in storages) and node.op == "placeholder":
            unreleasable.add(node.name)
    return _Interface(forward, [s for s in {**owned, **passed} if s not in read], unreleasable)


def _returned(forward: GraphStorages, n_results: int) -> tuple[list[fx.Node], list[fx.Node]]:
    """Return the nodes that the forward returns, and those among the first `n_results`."""
    last = forward.nodes[-1] if forward.nodes else None
    if last is None or last.op != "output":
        raise CaptureError(
            "the forward graph has no output, so what its backward needs is unknown; give it one"
        )
    leaves = tree_leaves(last.args[0])[:n_results]
    return last.all_input_nodes, [leaf for leaf in leaves if isinstance(leaf, fx.Node)]
