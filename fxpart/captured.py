"""A model's graph: from the cache when it is there, else built, captured and kept.

Torch is imported only when a capture is needed: a warm start costs a file's reading.
"""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from fxpart.errors import SpecError, nearest_names
from fxpart.graph import OpGraph
from fxpart.graph_cache import cache_key, cached_path, read_graph, write_graph
from fxpart.models.spec import ModelSpec

__all__ = ["CapturedGraph", "Level", "captured_graph"]

Level = Literal["operator", "module"]
"""``operator``: `torch.export`, any model. ``module``: `torch.fx.symbolic_trace`, plain ones."""


@dataclass(frozen=True, eq=False, slots=True)
class CapturedGraph:
    """A graph and how it was come by."""

    graph: OpGraph
    seconds: float
    """Time to read it, or to build and capture it."""
    from_cache: bool


def captured_graph(spec: ModelSpec, level: str, cache_dir: Path | None) -> CapturedGraph:
    """Return the graph of the model that `spec` names; without `cache_dir`, always captured.

    Raises:
        SpecError: for a model, an input shape or a level that does not exist.
        CaptureError: for a model that cannot be built or captured.
        CacheError: when the cache cannot be written.

    """
    if level not in get_args(Level):
        raise SpecError(
            f"capture.level={level} does not exist; {nearest_names(level, get_args(Level))}"
        )
    begin = time.perf_counter()
    path = cached_path(cache_dir, cache_key(spec.key(), level)) if cache_dir else None
    graph = read_graph(path) if path else None
    if graph is not None:
        return CapturedGraph(graph, time.perf_counter() - begin, from_cache=True)
    graph = _capture(spec, level)
    if path:
        write_graph(path, graph)
    return CapturedGraph(graph, time.perf_counter() - begin, from_cache=False)


def _capture(spec: ModelSpec, level: str) -> OpGraph:
    # These import torch and transformers: seconds that a warm start does not pay.
    from fxpart.capture import export_program, module_graph, op_graph, trace_modules
    from fxpart.models.build import build_model

    built = build_model(spec)
    if level == "operator":
        return op_graph(export_program(built.module, built.args, built.kwargs))
    if built.kwargs:
        raise SpecError(
            f"capture.level=module takes models with positional inputs, {spec.name} has named"
            f" ones ({', '.join(built.kwargs)}); use capture.level=operator"
        )
    return module_graph(trace_modules(built.module), built.args)
