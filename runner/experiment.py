"""One experiment: a typed `Config` in, a placement and its cost out. Writes nothing."""

import time
from dataclasses import dataclass
from pathlib import Path

from fxpart.assignment import Assignment
from fxpart.captured import CapturedGraph, captured_graph
from fxpart.cost.evaluate import evaluate
from fxpart.cost.evaluation import Evaluation
from fxpart.cost.roofline import LatencyModel
from fxpart.errors import InfeasibleError
from fxpart.granularity import depth_of, group_operators
from fxpart.models.spec import ModelSpec
from fxpart.modes import make_mode
from fxpart.problem import Problem, make_problem
from fxpart.saturate import saturate
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
    depth_of(config.granularity)
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
    graph = group_operators(captured.graph, config.granularity)
    problem = make_problem(graph, topology, latency)
    with progress(f"placing {graph.n_ops} operators with {config.mode.name}"):
        begin = time.perf_counter()
        try:
            assignment = place(problem)
        except InfeasibleError as error:
            if not _finer_may_fit(problem, config.granularity):
                raise
            raise _with_advice(error, config.granularity) from error
        if config.devices.saturate_host:
            assignment = saturate(problem, assignment)
        partition_s = time.perf_counter() - begin
    return Result(captured, problem, assignment, evaluate(problem, assignment), partition_s)


def _finer_may_fit(problem: Problem, granularity: str) -> bool:
    room = int(problem.topology.memory_bytes.sum())
    return granularity != "operator" and problem.graph.total_weight_bytes <= room


def _with_advice(error: InfeasibleError, granularity: str) -> InfeasibleError:
    return InfeasibleError(
        f"{error}; granularity={granularity} keeps whole modules together: a finer one, such as"
        " granularity=operator, may fit",
        needed_bytes=error.needed_bytes,
        available_bytes=error.available_bytes,
        devices_that_fit=error.devices_that_fit,
    )
