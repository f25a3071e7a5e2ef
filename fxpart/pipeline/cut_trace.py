"""A module traced as deep as its cuts are: what holds a cut is opened, all else stays whole."""

import warnings
from dataclasses import dataclass
from typing import Any

from torch import fx, nn

from fxpart.errors import CaptureError, one_line

__all__ = ["CutTrace", "trace_opened"]


@dataclass(frozen=True, eq=False, slots=True)
class CutTrace:
    """The graph of a module, and where in it the calls of its modules end."""

    graph_module: fx.GraphModule
    ends: dict[str, list[fx.Node]]
    """For each module that was called, by path: the last node at the end of each of its calls."""


def trace_opened(model: nn.Module, opened: frozenset[str]) -> CutTrace:
    """Return the graph of `model` in which the modules in `opened`, and itself, are in line.

    All other modules are one call each; what is in them need not be traceable.

    Raises:
        CaptureError: when a module in `opened`, or `model` itself, cannot be traced.

    """
    tracer = _Tracer(opened)
    try:
        with warnings.catch_warnings():
            # What the model or torch warns of concerns a run with data; here there is none.
            warnings.simplefilter("ignore")
            graph = tracer.trace(model)
    # Tracing runs the code of the model, which may fail in any way.
    except Exception as error:
        raise _untraceable(model, tracer.inside, error) from error
    return CutTrace(fx.GraphModule(model, graph, type(model).__name__), tracer.ends)


class _Tracer(fx.Tracer):
    """Opens some modules, and notes where each call of a module ends."""

    def __init__(self, opened: frozenset[str]) -> None:
        super().__init__()
        self._opened = opened
        self.ends: dict[str, list[fx.Node]] = {}
        self.inside: list[str] = []
        """Paths of the opened modules whose calls have begun and not ended, the innermost last."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Return whether a module stays whole."""
        return module_qualified_name not in self._opened

    def call_module(
        self,
        m: nn.Module,
        forward: Any,  # noqa: ANN401 - as fx has it
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:  # noqa: ANN401 - as fx has it
        """Trace one call of a module."""
        path = self.path_of_module(m)
        self.inside.append(path)
        result = super().call_module(m, forward, args, kwargs)
        self.inside.pop()
        self.ends.setdefault(path, []).append(next(iter(reversed(self.graph.nodes))))
        return result


def _untraceable(model: nn.Module, inside: list[str], error: Exception) -> CaptureError:
    path = inside[-1] if inside else ""
    failed = model.get_submodule(path)
    what = f"{path} ({type(failed).__name__})" if path else type(failed).__name__
    higher = f"; cut at a higher level, such as after {path}" if path else ""
    return CaptureError(
        f"{what} cannot be traced, which a cut inside it needs: {one_line(error)}{higher}; or"
        " export the model and split it by operators, with split_by_assignment"
    )
