"""Operators added at the end of a graph, each of which stays with one that is there."""

from dataclasses import replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from fxpart.granularity import join_groups
from fxpart.graph import IntArray, OpGraph

__all__ = ["AddedOperators", "with_operators"]


class AddedOperators(NamedTuple):
    """K operators of no FLOPs, each of which reads one value and makes one. Length K each."""

    names: tuple[str, ...]
    """Of the operator, and of the value that it makes."""
    modules: tuple[str, ...]
    target: str
    """Of all of them; no array."""
    dtypes: tuple[str, ...]
    moved_bytes: IntArray
    reads: IntArray
    """The value that each reads."""
    partner: IntArray
    """The operator of the graph that each stays with, and whose forward operator is its own."""
    uses: IntArray
    """The weight storage that each uses; or of length 0, if they use none."""
    made_bytes: IntArray
    """Of the value that each makes, in storage of its own."""
    stays: npt.NDArray[np.bool_]
    """Whether that lives to the end of the step."""


def with_operators(graph: OpGraph, added: AddedOperators) -> OpGraph:
    """Return `graph` with further operators at its end. O(n log n)."""
    n, count = graph.n_ops, len(added.names)
    numbers = np.arange(n, n + count)
    partners = np.concatenate([np.arange(n), added.partner])
    group = np.concatenate([graph.group, numbers])
    use_counts = np.zeros(count, dtype=np.int64) + (len(added.uses) > 0)
    return replace(
        graph,
        names=graph.names + added.names,
        modules=graph.modules + added.modules,
        targets=graph.targets + (added.target,) * count,
        dtypes=graph.dtypes + added.dtypes,
        flops=_joined(graph.flops, np.zeros(count)),
        moved_bytes=_joined(graph.moved_bytes, added.moved_bytes),
        group=join_groups(group, partners),
        value_names=graph.value_names + added.names,
        value_producer=_joined(graph.value_producer, numbers),
        value_bytes=_joined(graph.value_bytes, added.made_bytes),
        value_alloc_bytes=_joined(graph.value_alloc_bytes, added.made_bytes),
        value_base=_joined(graph.value_base, np.full(count, -1)),
        value_is_output=np.concatenate([graph.value_is_output, added.stays]),
        read_start=_joined(graph.read_start, len(graph.reads) + np.arange(1, count + 1)),
        reads=_joined(graph.reads, added.reads),
        use_start=_joined(graph.use_start, len(graph.uses) + np.cumsum(use_counts)),
        uses=_joined(graph.uses, added.uses),
        forward_of=_joined(graph.forward_of, graph.forward_of[added.partner]),
    )


def _joined(there: IntArray, more: npt.NDArray[np.generic]) -> IntArray:
    return np.concatenate([there, more.astype(np.int64)])
