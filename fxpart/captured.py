"""A model's graph: from the cache when it is there, else built, captured and kept.

Torch is imported only when a capture is needed: a warm start costs a file's reading.
"""

import time
from dataclasses import asdict, dataclass
from pathlib import Path

from fxpart.graph import OpGraph
from fxpart.graph_cache import cache_key, cached_path, read_graph, write_graph
from fxpart.levels import check_level
from fxpart.models.factory_source import factory_as_read, factory_place, loaded_sources
from fxpart.models.files_read import files_read_by, note_files
from fxpart.models.spec import ModelSpec
from fxpart.phases import StepOptions, check_phase

__all__ = ["CapturedGraph", "captured_graph", "step_key"]

_USUAL = StepOptions()


@dataclass(frozen=True, eq=False, slots=True)
class CapturedGraph:
    """A graph and how it was come by."""

    graph: OpGraph
    seconds: float
    """Time to read it, or to build and capture it."""
    from_cache: bool


def captured_graph(
    spec: ModelSpec,
    level: str,
    cache_dir: Path | None,
    phase: str = "inference",
    *,
    train_mode: bool = False,
    options: StepOptions = _USUAL,
) -> CapturedGraph:
    """Return the graph of the model that `spec` names; without `cache_dir`, always captured.

    In the phase ``training`` that is the graph of `fxpart.capture.joint_capture` with `options`,
    of the model in ``train()`` or, without `train_mode`, in ``eval()``.

    Raises:
        SpecError: for a model, an input shape, a level or a phase that does not exist.
        CaptureError: for a model that cannot be built or captured.
        CacheError: when the cache cannot be written.

    """
    check_level(level)
    check_phase(phase, level)
    begin = time.perf_counter()
    step = step_key(phase, train_mode=train_mode, options=options)
    path = cached_path(cache_dir, cache_key(spec.key(), level, phase, step)) if cache_dir else None
    kept = read_graph(path, factory_place(spec.factory)) if path else None
    if kept is not None:
        graph, read_then = kept
        note_files(spec.factory, read_then)
        return CapturedGraph(graph, time.perf_counter() - begin, from_cache=True)
    # What a forward imports, and opens, is read while it is captured.
    with factory_as_read(spec.factory):
        graph = _capture(spec, level, phase, train_mode=train_mode, options=options)
    if path:
        sources = loaded_sources() if spec.factory else ()
        read_now, place = files_read_by(spec.factory), factory_place(spec.factory)
        write_graph(path, graph, sources, files_read=read_now, place=place)
    return CapturedGraph(graph, time.perf_counter() - begin, from_cache=False)


def step_key(phase: str, *, train_mode: bool, options: StepOptions) -> dict[str, object]:
    """Return what of a training step decides its graph beside the model; empty in inference."""
    return {"train_mode": train_mode, **asdict(options)} if phase == "training" else {}


def _capture(
    spec: ModelSpec, level: str, phase: str, *, train_mode: bool, options: StepOptions
) -> OpGraph:
    # These import torch and transformers: seconds that a warm start does not pay.
    from fxpart.capture import capture_graph, joint_graph
    from fxpart.models.build import build_model

    built = build_model(spec)
    if phase == "training":
        built.module.train(train_mode)
        return joint_graph(built.module, built.args, built.kwargs, options)
    return capture_graph(built.module, built.args, built.kwargs, level)
