"""One experiment: a typed `Config` in, a placement and its cost out. Writes nothing."""

import time
from dataclasses import dataclass
from pathlib import Path

from fxpart.assignment import Assignment
from fxpart.captured import CapturedGraph, captured_graph
from fxpart.cost.evaluate import evaluate
from fxpart.cost.evaluation import Evaluation
from fxpart.cost.roofline import LatencyModel
from fxpart.models.spec import ModelSpec
from fxpart.modes import make_mode
from fxpart.problem import Problem, make_problem
from runner.config import Config, build_topology
from runner.terminal import progress

__all__ = ["Result", "model_spec", "run"]


@dataclass(frozen=True, eq=False, slots=True)
class Result:
    """What an experiment found."""

    captured: CapturedGraph
    problem: Problem
    assignment: Assignment
    evaluation: Evaluation
    partition_s: float
    """Time that the mode took."""


def model_spec(config: Config) -> ModelSpec:
    """Return what `config.model` says as the library takes it."""
    model = config.model
    return ModelSpec(
        name=model.name,
        architecture=model.architecture,
        config=dict(model.config),
        factory=model.factory,
        factory_args=dict(model.factory_args),
        batch_size=model.batch_size,
        seq_len=model.seq_len,
        dtype=model.dtype,
    )


def run(config: Config, spec: ModelSpec) -> Result:
    """Return the placement that `config` asks for and what it costs; `spec` is its `model_spec`.

    Raises:
        FxpartError: for anything that the user can mend, the model not fitting among it.

    """
    # What is cheap to refuse is refused before the model is captured.
    place = make_mode(config.mode.name, config.mode.options)
    topology = build_topology(config.devices, config.transfer_rate)
    latency = LatencyModel(
        compute_efficiency=config.latency.compute_efficiency,
        bandwidth_efficiency=config.latency.bandwidth_efficiency,
        op_overhead_s=config.latency.op_overhead_s,
    )
    cache_dir = Path(config.capture.cache_dir) if config.capture.use_cache else None
    with progress(f"capturing {spec.name}"):
        captured = captured_graph(spec, config.capture.level, cache_dir)
    problem = make_problem(captured.graph, topology, latency)
    with progress(f"placing {captured.graph.n_ops} operators with {config.mode.name}"):
        begin = time.perf_counter()
        assignment = place(problem)
        partition_s = time.perf_counter() - begin
    return Result(captured, problem, assignment, evaluate(problem, assignment), partition_s)
