"""The subject of a plan: a captured graph, and the model itself if the plan is executed.

A sweep places one model hundreds of times, so a process keeps the most recent few in memory.
"""

import time
from collections import OrderedDict
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING

import numpy as np

from fxpart.capture.captured import (
    CapturedGraph,
    CapturedSymbolic,
    captured_graph,
    captured_symbolic,
    graph_path,
    symbols_named,
)
from fxpart.capture.models.spec import ModelSpec
from fxpart.core.few_bits import with_chosen_experts
from fxpart.core.granularity import group_operators
from fxpart.core.graph import MOST_KEPT_GRAPHS, IntArray, OpGraph
from fxpart.core.optimizer import with_optimizer
from fxpart.core.phases import check_phase
from fxpart.core.reserve import rounded
from fxpart.core.symbolic_graph import SymbolicGraph, on_graph
from fxpart.core.workload import Workload
from fxpart.cost.all_reduce import partial_values, with_buckets
from fxpart.errors import CaptureError, SpecError
from fxpart.sharding.main_gradients import with_main_gradients
from fxpart.support.digest import stable_digest
from runner.config.schema import Config
from runner.experiment.mesh import (
    GATHERING,
    replica_count,
    shares_something,
    weight_replicas,
)
from runner.experiment.objective import published_graph
from runner.experiment.runtime import held_as_run
from runner.experiment.serving import as_served, generates, is_serving
from runner.experiment.serving_steps import ServingSteps, serving_steps
from runner.experiment.topology import rounding_bytes
from runner.experiment.training import (
    is_megatron,
    is_training,
    optimizer_of,
    step_options,
)
from runner.experiment.zero import in_stages, sharded_graph, with_weight_shards

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.export import ExportedProgram

    from fxpart.capture.training.joint import JointCapture
    from fxpart.execution.real_model import RealModel

__all__ = [
    "Subject",
    "graph_to_place",
    "is_captured",
    "placed_graph",
    "shared_subject",
    "subject_of",
    "symbols_of",
]


@dataclass(frozen=True, eq=False, slots=True)
class Subject:
    """A graph to place, with the model to run or measure."""

    captured: CapturedGraph
    program: "Callable[[], ExportedProgram]"
    """Returns the program with the operators of the graph, capturing it if necessary."""
    real: "RealModel | None" = None
    """The model to run, with weights; only the forward of a training step."""
    exported_names: tuple[str, ...] = ()
    """For a training step to run: the operator of `real` that each operator is part of."""
    step: "JointCapture | None" = None
    """The training step to run."""
    symbolic: SymbolicGraph | None = None
    """The graph with symbolic sizes, if captured that way."""
    sizes: dict[str, int] = field(default_factory=dict)
    """The value of each symbol."""
    workload: Workload | None = None
    """The published problem to place instead of a model."""
    unconverted: OpGraph | None = None
    """The graph before weights and cache were converted to few bits, or weights sharded; None if
    they were not."""
    partial: IntArray | None = None
    """With several replicas, the values that are all-reduced."""
    partial_ranks: IntArray | None = None
    """The number of replicas over which each of `partial` is summed; None for all."""
    steps: ServingSteps | None = None
    """Both steps of a generation at any size; `captured` is then the last decode."""


_kept: OrderedDict[str, Subject] = OrderedDict()
"""Subjects by `_key`, in order of last use."""
_lock = Lock()


def shared_subject(config: Config, spec: ModelSpec) -> Subject:
    """Return `subject_of` the config, from memory if this process has made it before.

    Models to run, and graphs captured without a cache, are made anew each time.

    Raises:
        FxpartError: if the model cannot be built, captured or held in memory.

    """
    begin = time.perf_counter()
    if config.model.path is not None:
        captured, workload = published_graph(config)
        return Subject(captured, lambda: _program(config, spec), workload=workload)
    key = _key(config, spec)
    if key is None:
        return subject_of(config, spec)
    with _lock:
        subject = _kept.get(key)
        if subject is not None:
            _kept.move_to_end(key)
            seconds = time.perf_counter() - begin
            captured = replace(subject.captured, seconds=seconds, from_cache=True)
            return replace(subject, captured=captured)
    subject = subject_of(config, spec)
    if _key(config, spec) == key:  # no file of the model changed during the capture
        with _lock:
            _kept[key] = subject
            while len(_kept) > MOST_KEPT_GRAPHS:
                _kept.popitem(last=False)
    return subject


def _key(config: Config, spec: ModelSpec) -> str | None:
    """Return the hash of everything that decides the subject; None if it is not shared."""
    if config.execute.name != "none" or not config.capture.use_cache:
        return None
    parts = {
        "model": spec.key(),
        "capture": asdict(config.capture),
        "phase": asdict(config.phase),
        "optimizer": asdict(config.optimizer),
        "checkpointing": [config.checkpointing, *config.recomputed_blocks],
        "backward_order": config.backward_order,
        "runtime": asdict(config.runtime),
        "weights": asdict(config.weights),
        "kv_cache": config.kv_cache,
        "latent_attention": config.latent_attention,
        "prompt_len": config.prompt_len,  # the spec has only the total length of a generation
        "data_parallel": config.data_parallel,
        "zero": [config.zero, config.reduce_dtype, config.zero > 0 and in_stages(config)],
        "all_reduce": asdict(config.all_reduce),
    }
    return stable_digest(parts)


@lru_cache(maxsize=MOST_KEPT_GRAPHS)
def placed_graph(graph: OpGraph, rounding_bytes: int, granularity: str) -> OpGraph:
    """Return `graph` ready to place: sizes rounded as by the allocator, operators grouped.

    Raises:
        SpecError: if the multiple is below 1, or the granularity unknown.

    """
    return group_operators(rounded(graph, rounding_bytes), granularity)


def graph_to_place(config: Config, subject: Subject) -> OpGraph:
    """Return the `placed_graph` of a subject, rounded and grouped as in `config`."""
    rounding = rounding_bytes(config.devices, config.reserve)
    return placed_graph(subject.captured.graph, rounding, config.granularity)


def subject_of(config: Config, spec: ModelSpec) -> Subject:
    """Return the subject of `config`; `spec` is its model.

    If the plan is not executed, the graph comes from the cache if possible. Otherwise the model is
    built with weights, and the graph is captured from it.

    Raises:
        FxpartError: if the model cannot be built, captured or held in memory.

    """
    phase, cache = config.phase.name, config.capture
    if generates(config):
        return _generation_subject(config, spec)
    if config.execute.name == "none":
        symbols = symbols_of(config)
        if shares_something(config):
            return _mesh_subject(config, spec)
        if symbols:
            return _symbolic_subject(config, spec, symbols)
        captured = _captured(config, spec)
        run = _as_run(config, captured.graph)
        graph = as_served(config, run)
        return Subject(
            replace(captured, graph=graph),
            lambda: _program(config, spec),
            unconverted=None if graph is run else run,
        )
    check_phase(phase, cache.level)
    from fxpart.execution.real_model import real_model

    begin = time.perf_counter()
    real = real_model(spec, seed=config.execute.seed, device=config.execute.device)
    if phase == "training":
        return _training_step(config, real, begin)
    graph = _as_run(config, real.graph)
    captured = CapturedGraph(graph, time.perf_counter() - begin, from_cache=False)
    return Subject(captured, lambda: real.program, real)


def _generation_subject(config: Config, spec: ModelSpec) -> Subject:
    steps = serving_steps(config, spec)
    texts, _, context_len = steps.sizes
    graph = steps.decode(texts, context_len)
    return Subject(
        CapturedGraph(graph, steps.seconds, steps.from_cache),
        lambda: _program(config, spec),
        unconverted=steps.unconverted(texts, context_len),
        steps=steps,
        # Replicas of separate texts sum nothing.
        partial=np.zeros(0, dtype=np.int64) if config.data_parallel > 1 else None,
    )


def _training_step(config: Config, real: "RealModel", begin: float) -> Subject:
    from fxpart.capture.inference.from_export import op_graph
    from fxpart.capture.training.joint import joint_capture

    step = joint_capture(real.module, real.args, real.kwargs, step_options(config))
    captured = CapturedGraph(
        _as_run(config, step.graph), time.perf_counter() - begin, from_cache=False
    )
    forward = replace(real, program=step.forward, graph=op_graph(step.forward))
    return Subject(captured, lambda: step.program, forward, step.exported_names, step)


def symbols_of(config: Config) -> tuple[str, ...]:
    """Return the sizes captured as symbols; replicas need a symbolic batch.

    Raises:
        SpecError: if ``capture.symbolic`` is unknown, or conflicts with other choices.

    """
    symbols = symbols_named(config.capture.symbolic)
    if symbols and config.execute.name != "none":
        raise SpecError(
            f"capture.symbolic={config.capture.symbolic} plans for all sizes, but "
            f"execute={config.execute.name} runs one size; leave out one of the two"
        )
    if symbols and config.capture.level != "operator":
        raise SpecError(
            f"capture.symbolic={config.capture.symbolic} captures operators, got capture.level="
            f"{config.capture.level}; use capture.level=operator"
        )
    return symbols or (
        ("batch",) if config.data_parallel > 1 and not shares_something(config) else ()
    )


def _captured_symbolic(
    config: Config, spec: ModelSpec, symbols: tuple[str, ...]
) -> CapturedSymbolic:
    cache = config.capture
    try:
        return captured_symbolic(
            spec,
            symbols,
            Path(cache.cache_dir) if cache.use_cache else None,
            config.phase.name,
            train_mode=config.phase.train_mode,
            options=step_options(config),
        )
    except (CaptureError, SpecError) as error:
        reason, hint, _ = str(error).partition("; set capture.symbolic=none")
        if not hint or symbols_named(cache.symbolic):
            raise
        # The user did not choose symbols: replicas need them.
        raise type(error)(
            f"{reason}; data_parallel={config.data_parallel} needs a symbolic batch, set"
            " data_parallel=1"
        ) from error


def _symbolic_subject(config: Config, spec: ModelSpec, symbols: tuple[str, ...]) -> Subject:
    captured_sizes = _captured_symbolic(config, spec, symbols)
    if config.zero or (is_training(config) and config.weights.name != "none"):
        return _fixed_size_subject(config, spec, captured_sizes)
    symbolic = on_graph(captured_sizes.symbolic, _as_run(config, captured_sizes.symbolic.graph))
    partial = None
    if config.data_parallel > 1:
        partial = partial_values(symbolic.graph, symbolic.value_batch_dim)
        if is_serving(config):  # separate texts, each with its own choice of experts
            partial = partial[:0]
        if not config.all_reduce.gradient_as_bucket_view:
            symbolic = on_graph(symbolic, with_buckets(symbolic.graph, partial))
    size_of = {"batch": spec.batch_size, "seq_len": spec.seq_len}
    sizes = {symbol: size for symbol in symbols if (size := size_of[symbol]) is not None}
    run = symbolic.at(**sizes)
    if config.capture.symbolic == "none":
        run = with_chosen_experts(run)
    graph = as_served(config, run)
    return Subject(
        CapturedGraph(graph, captured_sizes.seconds, captured_sizes.from_cache),
        lambda: _program(config, spec),
        symbolic=symbolic,
        sizes=sizes,
        partial=partial,
        unconverted=None if graph is run else run,
    )


def _mesh_subject(config: Config, spec: ModelSpec) -> Subject:
    """Return a replica that shares experts or sequences with others, at the fixed size of `spec`.

    Its loss and gradients are partial sums; nothing else is all-reduced.
    """
    captured = _captured(config, spec)
    graph = captured.graph
    weights, partial = graph.gradient_weights, graph.gradient_values
    if is_training(config):
        loss = graph.value_is_output & ~graph.is_backward[graph.value_producer]
        partial = np.union1d(np.flatnonzero(loss & (graph.value_producer >= 0)), partial)
    replicas = np.full(graph.n_values, replica_count(config), dtype=np.int64)
    replicas[graph.gradient_values] = weight_replicas(config, graph)[weights]
    partial = partial[replicas[partial] > 1]
    ranks = replicas[partial]
    if config.zero:
        if config.zero >= GATHERING:
            ranks = ranks[~np.isin(partial, graph.gradient_values)]
        graph, partial = sharded_graph(config, graph, partial)
    elif not config.all_reduce.gradient_as_bucket_view:
        graph = with_buckets(graph, partial)
    run = _as_run(config, graph)
    graph = as_served(config, run)
    return Subject(
        replace(captured, graph=graph),
        lambda: _program(config, spec),
        partial=partial,
        partial_ranks=ranks,
        unconverted=captured.graph,
    )


def _fixed_size_subject(config: Config, spec: ModelSpec, known: CapturedSymbolic) -> Subject:
    """Return a training step of few bits, or sharded over replicas, at the size of `spec`."""
    symbolic = known.symbolic
    whole = with_chosen_experts(symbolic.at(batch=spec.batch_size))
    partial = partial_values(whole, symbolic.value_batch_dim)
    graph = as_served(config, whole)
    value_of = {name: value for value, name in enumerate(graph.value_names)}
    partial = np.array([value_of[whole.value_names[v]] for v in partial.tolist()], dtype=np.int64)
    graph, partial = sharded_graph(config, graph, partial)
    captured = CapturedGraph(_as_run(config, graph), known.seconds, known.from_cache)
    return Subject(captured, lambda: _program(config, spec), partial=partial, unconverted=whole)


def _as_run(config: Config, graph: OpGraph) -> OpGraph:
    """Return `graph` with optimizer updates, and values held as under ``runtime``."""
    graph = held_as_run(config, graph)
    if is_megatron(config) and config.zero == 0:
        graph, _ = with_main_gradients(graph)
    if not is_training(config):
        return graph
    return with_weight_shards(config, with_optimizer(graph, optimizer_of(config)))


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


def is_captured(config: Config, spec: ModelSpec) -> bool:
    """Return whether the graph is in the cache at fixed sizes, so that planning imports no torch.

    Raises:
        SpecError: if ``capture.symbolic`` is unknown, or conflicts with other choices.

    """
    cache = config.capture
    if config.execute.name != "none" or not cache.use_cache or symbols_of(config):
        return False
    if generates(config):
        return False
    return graph_path(
        spec,
        cache.level,
        Path(cache.cache_dir),
        config.phase.name,
        train_mode=config.phase.train_mode,
        options=step_options(config),
    ).is_file()


def _program(config: Config, spec: ModelSpec) -> "ExportedProgram":
    from fxpart.capture.inference.export import export_program
    from fxpart.capture.models.build import build_model
    from fxpart.capture.training.joint import joint_capture

    built = build_model(spec)
    if is_training(config):
        built.module.train(config.phase.train_mode)
        step = joint_capture(built.module, built.args, built.kwargs, step_options(config))
        return step.program
    return export_program(built.module, built.args, built.kwargs)
