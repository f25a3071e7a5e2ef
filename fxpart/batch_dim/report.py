"""`BatchDimReport`: the answers for every node of a graph."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from fxpart.batch_dim.error import BatchDimError
from fxpart.batch_dim.layout import Layout
from fxpart.errors import nearest_names
from fxpart.graph import IntArray

__all__ = ["BatchDimReport", "NodeBatchDim", "value_batch_dims"]


@dataclass(frozen=True, eq=False, slots=True)
class NodeBatchDim:
    """The answer for one node."""

    name: str
    target: str
    """What the node calls; ``""`` for an input."""
    layouts: tuple[Layout, ...]
    """One for a tensor, one for each item of a tuple; what is no tensor counts as replicated."""
    is_tuple: bool
    all_reduced: tuple[str, ...] = ()
    """Partial values that must be all-reduced before the node runs, and are replicated from then
    on. Each is named by its first reader only."""
    by_size: bool = False
    """Whether the answer rests on an equality of sizes, no rule being known."""

    @property
    def dims(self) -> tuple[int, ...]:
        """For each item a dimension, -1 (replicated) or -2 (partial)."""
        return tuple(layout.dim for layout in self.layouts)


@dataclass(frozen=True, eq=False, slots=True)
class BatchDimReport:
    """The answers for all inputs and calls of a graph, in the order of the graph."""

    nodes: tuple[NodeBatchDim, ...]
    outputs: tuple[str, ...]
    """Names of the nodes that the graph returns, in order."""

    def of(self, name: str) -> NodeBatchDim:
        """Return the answer for the node of that name.

        Raises:
            BatchDimError: when there is none.

        """
        found = next((node for node in self.nodes if node.name == name), None)
        if found is None:
            near = nearest_names(name, (node.name for node in self.nodes))
            raise BatchDimError(f"the graph has no node {name}; {near}")
        return found


def value_batch_dims(report: BatchDimReport, value_names: Sequence[str]) -> IntArray:
    """Return the answer for each value of an `OpGraph`, int64, as long as `value_names`.

    Args:
        report: of the graph that the values were captured from.
        value_names: ``name`` for what a node makes, ``name.i`` for item i of a tuple.

    Raises:
        BatchDimError: for a name that the graph does not have.

    """
    dims: dict[str, int] = {}
    for node in report.nodes:
        dims[node.name] = node.dims[0]
        dims.update((f"{node.name}.{i}", dim) for i, dim in enumerate(node.dims))
    return np.array([_dim(dims, name) for name in value_names], dtype=np.int64)


def _dim(dims: Mapping[str, int], name: str) -> int:
    if name not in dims:
        raise BatchDimError(
            f"the analyzed graph has no value {name}; {nearest_names(name, dims)}; analyze the"
            " program that the OpGraph was made from"
        )
    return dims[name]
