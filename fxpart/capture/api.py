"""`capture`: capture a module and example inputs as a traced module and its `OpGraph`."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import fx, nn
from torch.export import ExportedProgram
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from fxpart.capture.inference.export import capture_failure, check_call, export_program
from fxpart.capture.inference.from_export import op_graph
from fxpart.capture.inference.module_level import module_graph, trace_modules
from fxpart.core.granularity import check_level
from fxpart.core.graph import OpGraph
from fxpart.errors import SpecError

__all__ = ["Capture", "capture", "capture_graph"]


@dataclass(frozen=True, eq=False, slots=True)
class Capture:
    """A captured model, as a torch module and as arrays."""

    graph_module: fx.GraphModule
    """Has the signature of the model and computes the same; its call nodes are named like the
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
    for weights, and the graph equals that of the real model. For `level`, see
    `fxpart.core.granularity`.

    Raises:
        SpecError: if the level is unknown, or does not take these inputs.
        CaptureError: if the model cannot be captured.

    """
    if _is_operator_level(module, args, kwargs, level):
        program, graph = _exported(module, args, kwargs)
        return Capture(program.module(), graph)
    traced = trace_modules(module)
    return Capture(traced, module_graph(traced, args))


def capture_graph(
    module: nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    level: str = "operator",
) -> OpGraph:
    """Return only the arrays, like ``capture(...).graph`` but faster."""
    if _is_operator_level(module, args, kwargs, level):
        return _exported(module, args, kwargs)[1]
    return module_graph(trace_modules(module), args)


def _exported(
    module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None
) -> tuple[ExportedProgram, OpGraph]:
    program = export_program(module, args, kwargs)
    try:
        return program, op_graph(program)
    except GuardOnDataDependentSymNode as error:
        # A data-dependent size is a symbol without a value.
        raise capture_failure(module, error) from error
    except TypeError as error:
        if "SymInt" not in str(error):  # a data-dependent size used as a number
            raise
        raise capture_failure(module, error) from error


def _is_operator_level(
    module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None, level: str
) -> bool:
    check_level(level)
    check_call(module, args)
    if level == "module" and kwargs:
        raise SpecError(
            f"capture.level=module takes positional inputs, {type(module).__name__} was given"
            f" named ones ({', '.join(kwargs)}); use capture.level=operator"
        )
    return level == "operator"
