"""What the stages of a pipeline pass on when each hears from the one before only."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fxpart.graph import IntArray, OpGraph

__all__ = ["Crossing", "crossing"]

BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True, eq=False, slots=True)
class Crossing:
    """From which stage to which each value goes in a forward; length V each."""

    first: IntArray
    """The stage that has it first: that makes it, or 0 for an input."""
    last: IntArray
    """The last stage that needs it; all between pass it on. Not above `first` for a value that
    stays where it is."""
    trained: BoolArray
    """Whether it is real-valued and depends on weights, so that its gradient comes back."""

    def received(self, stage: int) -> BoolArray:
        """Return which values `stage` receives from the one before."""
        found: BoolArray = (self.first < stage) & (self.last >= stage)
        return found


def crossing(graph: OpGraph, stage_of: IntArray) -> Crossing:
    """Return what crosses in the forward of `graph`, whose operators are of the given stages.

    A result of the model that an earlier stage makes is passed on to the last stage. A value has
    the dtype that its operator computes in.
    """
    made = graph.value_producer >= 0
    maker = np.where(made, graph.value_producer, 0)
    first = np.where(made, stage_of[maker], 0)
    last = first.copy()
    readers, first_backward = graph.readers, graph.first_backward
    forward = readers < first_backward
    np.maximum.at(last, graph.reads[forward], stage_of[readers[forward]])
    early = maker < first_backward
    last[made & early & graph.value_is_output] = stage_of.max()
    return Crossing(
        np.where(early, first, 0), np.where(early, last, 0), made & early & _trained(graph)[maker]
    )


def _trained(graph: OpGraph) -> BoolArray:
    """Return whether an operator computes real numbers that depend on weights. Length n."""
    found = np.diff(graph.use_start) > 0
    for op in range(graph.n_ops):
        if not found[op]:
            makers = graph.value_producer[graph.reads_of(op)]
            found[op] = found[makers[makers >= 0]].any()
        found[op] &= "float" in graph.dtypes[op]
    return found
