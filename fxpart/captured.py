"""A model's graph: from the cache when it is there, else built, captured and kept.

Torch is imported only when a capture is needed: a warm start costs a file's reading.
"""

import time
from dataclasses import dataclass
from pathlib import Path

from fxpart.graph import OpGraph
from fxpart.graph_cache import cache_key, cached_path, read_graph, write_graph
from fxpart.levels import check_level
from fxpart.models.factory_source import loaded_sources
from fxpart.models.spec import ModelSpec
from fxpart.phases import check_phase

__all__ = ["CapturedGraph", "captured_graph"]


@dataclass(frozen=True, eq=False, slots=True)
class CapturedGraph:
    """A graph and how it was come by."""

    graph: OpGraph
    seconds: float
    """Time to read it, or to build and capture it."""
    from_cache: bool


def captured_graph(
    spec: ModelSpec, level: str, cache_dir: Path | None, phase: str = "inference"
) -> CapturedGraph:
    """Return the graph of the model that `spec` names; without `cache_dir`, always captured.

    In the phase ``training`` that is the graph of `fxpart.capture.joint_capture`.

    Raises:
        SpecError: for a model, an input shape, a level or a phase that does not exist.
        CaptureError: for a model that cannot be built or captured.
        CacheError: when the cache cannot be written.

    """
    check_level(level)
    check_phase(phase, level)
    begin = time.perf_counter()
    path = cached_path(cache_dir, cache_key(spec.key(), level, phase)) if cache_dir else None
    graph = read_graph(path) if path else None
    if graph is not None:
        return CapturedGraph(graph, time.perf_counter() - begin, from_cache=True)
    graph = _capture(spec, level, phase)
    if path:
        write_graph(path, graph, loaded_sources() if spec.factory else ())
    return CapturedGraph(graph, time.perf_counter() - begin, from_cache=False)


def _capture(spec: ModelSpec, level: str, phase: str) -> OpGraph:
    # These import torch and transformers: seconds that a warm start does not pay.
    from fxpart.capture import capture_graph, joint_graph
    from fxpart.models.build import build_model

    built = build_model(spec)
    if phase == "training":
        return joint_graph(built.module, built.args, built.kwargs)
    return capture_graph(built.module, built.args, built.kwargs, level)
