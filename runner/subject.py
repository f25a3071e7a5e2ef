"""What a run plans for: a captured graph, and the model itself where the plan is carried out."""

import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from fxpart.captured import CapturedGraph, captured_graph
from fxpart.models.spec import ModelSpec
from fxpart.phases import check_phase
from fxpart.training.optimizer import with_optimizer
from runner.sections import Config
from runner.training import is_training, optimizer_of, step_options

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.export import ExportedProgram

    from fxpart.execution.real_model import RealModel

__all__ = ["Subject", "subject_of"]


@dataclass(frozen=True, eq=False, slots=True)
class Subject:
    """What is placed, and what can be run or measured of it."""

    captured: CapturedGraph
    program: "Callable[[], ExportedProgram]"
    """Returns the program whose operators are those of the graph; that may take a capture."""
    real: "RealModel | None" = None
    """What is really run, with weights: of a training step its forward."""
    exported_names: tuple[str, ...] = ()
    """Of a training step that is run: which operator of `real` each operator is a part of."""


def subject_of(config: Config, spec: ModelSpec) -> Subject:
    """Return what `config` asks to be planned; `spec` is its model.

    A graph that is only placed comes from the cache where it can. What is run is built with its
    weights, and the graph is that of what is run.

    Raises:
        FxpartError: for a model that cannot be built, captured or held.

    """
    phase, cache = config.phase.name, config.capture
    if config.execute.name == "none":
        captured = _captured(config, spec)
        graph = (
            with_optimizer(captured.graph, optimizer_of(config))
            if is_training(config)
            else captured.graph
        )
        return Subject(replace(captured, graph=graph), lambda: _program(config, spec))
    check_phase(phase, cache.level)
    from fxpart.execution.real_model import real_model

    begin = time.perf_counter()
    real = real_model(spec, seed=config.execute.seed, device=config.execute.device)
    if phase == "inference":
        captured = CapturedGraph(real.graph, time.perf_counter() - begin, from_cache=False)
        return Subject(captured, lambda: real.program, real)
    return _training_step(real, begin)


def _training_step(real: "RealModel", begin: float) -> Subject:
    from fxpart.capture import joint_capture, op_graph

    step = joint_capture(real.module, real.args, real.kwargs)
    captured = CapturedGraph(step.graph, time.perf_counter() - begin, from_cache=False)
    forward = replace(real, program=step.forward, graph=op_graph(step.forward))
    return Subject(captured, lambda: step.program, forward, step.exported_names)


def _captured(config: Config, spec: ModelSpec) -> CapturedGraph:
    cache = config.capture
    return captured_graph(
        spec,
        cache.level,
        Path(cache.cache_dir) if cache.use_cache else None,
        config.phase.name,
        train_mode=config.phase.train_mode,
        options=step_options(config),
    )


def _program(config: Config, spec: ModelSpec) -> "ExportedProgram":
    from fxpart.capture import export_program, joint_capture
    from fxpart.models.build import build_model

    built = build_model(spec)
    if is_training(config):
        built.module.train(config.phase.train_mode)
        step = joint_capture(built.module, built.args, built.kwargs, step_options(config))
        return step.program
    return export_program(built.module, built.args, built.kwargs)
