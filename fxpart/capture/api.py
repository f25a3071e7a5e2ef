"""`capture`: a module and example inputs in, the traced module and its `OpGraph` out."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torch import fx, nn

from fxpart.capture.export import export_program
from fxpart.capture.from_export import op_graph
from fxpart.capture.module_level import module_graph, trace_modules
from fxpart.errors import SpecError, nearest_names
from fxpart.graph import OpGraph

__all__ = ["Capture", "Level", "capture"]

Level = Literal["operator", "module"]
"""``operator``: `torch.export`, any model. ``module``: `torch.fx.symbolic_trace`, plain ones."""


@dataclass(frozen=True, eq=False, slots=True)
class Capture:
    """A captured model, as torch runs it and as arrays."""

    graph_module: fx.GraphModule
    """Computes what the model does, called as the model was; its call nodes carry the names of the
    operators in `graph`."""
    graph: OpGraph


def capture(
    module: nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    level: str = "operator",
) -> Capture:
    """Return `module` captured for the shapes and dtypes of the example inputs.

    Parameters and inputs may all be on the meta device: then a model of any size takes no memory
    for weights, and the graph is that of the real one.

    Raises:
        SpecError: for a level that does not exist, or inputs that it does not take.
        CaptureError: for a model that cannot be captured.

    """
    if level == "operator":
        program = export_program(module, args, kwargs)
        return Capture(program.module(), op_graph(program))
    if level != "module":
        raise SpecError(f"level {level!r} does not exist; {nearest_names(level, _LEVELS)}")
    if kwargs:
        raise SpecError(
            f"level module takes positional inputs, {type(module).__name__} was given named ones"
            f" ({', '.join(kwargs)}); use level operator"
        )
    traced = trace_modules(module)
    return Capture(traced, module_graph(traced, args))


_LEVELS = ("operator", "module")
