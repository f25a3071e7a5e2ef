"""One capture with symbolic input sizes: `symbolic_graph`."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from fxpart.capture.symbolic_fit import fitted_graph
from fxpart.capture.symbolic_program import SymbolicProgram, symbolic_program
from fxpart.capture.symbolic_range import Ranges
from fxpart.phases import StepOptions
from fxpart.symbolic.dims import SymbolicDim
from fxpart.symbolic.graph import SymbolicGraph

__all__ = ["SymbolicProgram", "fitted_graph", "symbolic_graph", "symbolic_program"]

_USUAL = StepOptions()


def symbolic_graph(
    module: nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    dims: Sequence[SymbolicDim] = (),
    phase: str = "inference",
    options: StepOptions = _USUAL,
    ranges: Ranges | None = None,
) -> SymbolicGraph:
    """Return the graph of `module`, or of a training step, as polynomials of its input sizes.

    See `symbolic_program` for what it takes. `SymbolicGraph.value_batch_dim` is -1 throughout.

    Raises:
        SpecError: for no `dims`, or some that the example inputs do not have.
        CaptureError: for a module that cannot be captured at all, or not with these sizes
            symbolic, and for a size that is no polynomial of them.

    """
    found = symbolic_program(
        module, args, kwargs, dims=dims, phase=phase, options=options, ranges=ranges
    )
    return fitted_graph(found)
