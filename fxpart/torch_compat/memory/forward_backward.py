"""Memory of a forward graph and the backward graph that runs after it.

The forward returns its results, then what the backward needs; the backward takes some of that, and
gradients of the results where the forward did not compute them. A value of both is recognised by
its storage, or, where a graph was read from a file, by the name of its node.
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
    """Return what stays in memory throughout the backward.

    The first item is the bytes that are no input of the backward, yet stay: results of the forward,
    and its inputs and attributes. The second is the names of the inputs of the backward that may
    not be released: inputs of the forward and views of them, and what the forward did not return.

    Args:
        fwd_graph: nodes of both carry ``meta["val"]``.
        bwd_graph: its inputs are named as, or share storages with, what the forward returns.
        size_of: makes a number of bytes that may be symbolic.
        n_results: that many first outputs of the forward are its caller's, who keeps them: where
            the backward reads them too, they may not be released.

    Raises:
        CaptureError: for a node without ``meta["val"]``, a size without a number, or a forward
            without an output.

    """
    meeting = _meeting(graph_storages(fwd_graph), graph_storages(bwd_graph), n_results)
    return meeting.stays_bytes(size_of), meeting.kept


def get_peak_memory(
    fwd_graph: fx.Graph,
    bwd_graph: fx.Graph,
    size_of: SizeOf | None = None,
    *,
    n_results: int = 0,
) -> int:
    """Return the most bytes in use while the forward runs, and then the backward.

    The inputs of the forward stay to the end. See `get_fwd_bwd_interactions` for the arguments and
    errors.
    """
    forward, backward = graph_storages(fwd_graph), graph_storages(bwd_graph)
    meeting = _meeting(forward, backward, n_results)
    before = memory_profile(forward, lambda node: not is_input(node), size_of)
    after = memory_profile(backward, lambda node: node.name not in meeting.kept, size_of)
    return max(*before, meeting.stays_bytes(size_of) + max(after))


@dataclass(frozen=True, eq=False, slots=True)
class _Meeting:
    """Where the two graphs meet."""

    forward: GraphStorages
    staying: list[int]
    """Storages of the forward that stay, and that the backward does not take."""
    kept: set[str]
    """Inputs of the backward that may not be released."""

    def stays_bytes(self, size_of: SizeOf | None) -> int:
        """Return the bytes of `staying`."""
        number_of = size_of or hinted_bytes
        tensors = [self.forward.tensors[storage] for storage in self.staying]
        return sum(number_of(tensor.untyped_storage().nbytes()) for tensor in tensors)


def _meeting(forward: GraphStorages, backward: GraphStorages, n_results: int) -> _Meeting:
    returned, results = _returned(forward, n_results)
    inputs = [node for node in forward.nodes if is_input(node)]
    owned = dict.fromkeys(_held(forward, [*inputs, *results]))
    going = dict.fromkeys(_held(forward, returned))
    by_number: dict[int, int] = {}
    for node in [*inputs, *returned]:
        by_number.update(forward.in_storage[forward.position[node]])
    by_name = {node.name: node for node in returned}
    taken, kept = set[int](), set[str]()
    for node, numbers in zip(backward.nodes, backward.in_storage, strict=True):
        if not is_input(node):
            continue
        lies_in = [by_number[number] for number in numbers if number in by_number]
        if not lies_in and node.name in by_name:
            lies_in = forward.held[forward.position[by_name[node.name]]]
        taken.update(lies_in)
        if not any(s in going and s not in owned for s in lies_in) and node.op == "placeholder":
            kept.add(node.name)
    return _Meeting(forward, [s for s in {**owned, **going} if s not in taken], kept)


def _returned(forward: GraphStorages, n_results: int) -> tuple[list[fx.Node], list[fx.Node]]:
    """Return the nodes that the forward returns, and those among the first `n_results`."""
    last = forward.nodes[-1] if forward.nodes else None
    if last is None or last.op != "output":
        raise CaptureError(
            "the forward graph has no output, so what its backward needs is not known; give it one"
        )
    leaves = tree_leaves(last.args[0])[:n_results]
    return last.all_input_nodes, [leaf for leaf in leaves if isinstance(leaf, fx.Node)]


def _held(storages: GraphStorages, nodes: list[fx.Node]) -> list[int]:
    """Return the storages that the results of `nodes` lie in."""
    return [s for node in nodes for s in storages.held[storages.position[node]]]
