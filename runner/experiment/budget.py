"""``checkpointing=budget``: the least block recomputation with which a training step fits."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from fxpart.core.assignment import Assignment
from fxpart.core.graph import FloatArray, OpGraph
from fxpart.cost.evaluate import evaluate
from fxpart.cost.problem import Problem
from fxpart.cost.recomputation import BlockCost, block_costs, chosen_blocks, least_again_s
from fxpart.errors import InfeasibleError
from runner.config.schema import Config
from runner.experiment.experiment import plan, problem_of
from runner.experiment.model_spec import model_spec
from runner.experiment.subject import shared_subject
from runner.output.terminal import counted, progress
from runner.output.units import format_s

__all__ = ["within_budget"]


def within_budget(config: Config) -> tuple[Config, str]:
    """Return the config with the least recomputation that fits, and a summary of the choice.

    Raises:
        InfeasibleError: if the step does not fit even with all blocks recomputed.
        FxpartError: for any other user error.

    """
    without = replace(config, checkpointing="none")
    if _fits(without):
        return without, "no block is recomputed, the step fits without"
    recomputing = replace(config, checkpointing="block")
    plan(recomputing, model_spec(recomputing))  # raises with advice if even this does not fit
    problems = [_problem(step) for step in (without, recomputing)]
    blocks = block_costs(_block_paths(recomputing), _timed(problems[0]), _timed(problems[1]))
    tried = 0

    def fits(names: Sequence[str]) -> bool:
        nonlocal tried
        tried += 1
        with progress(f"recomputing {counted(len(names), 'block')}"):
            return _fits(replace(recomputing, recomputed_blocks=list(names)))

    names = chosen_blocks(blocks, fits)
    summary = f"{len(names)} of {counted(len(blocks), 'block')} recomputed"
    return replace(recomputing, recomputed_blocks=list(names)), summary + _gap(
        config, problems[0], blocks, names
    )


def _fits(config: Config) -> bool:
    try:
        plan(config, model_spec(config), advises=False)
    except InfeasibleError:
        return False
    return True


def _block_paths(config: Config) -> tuple[str, ...]:
    from fxpart.capture.models.build import build_model
    from fxpart.capture.training.joint import repeated_blocks

    return repeated_blocks(build_model(model_spec(config)).module)


def _problem(config: Config) -> Problem:
    spec = model_spec(config)
    return problem_of(config, shared_subject(config, spec), spec)[0]


def _timed(problem: Problem) -> tuple[OpGraph, FloatArray]:
    """Return the graph, and the time of each operator on its fastest device."""
    times: FloatArray = problem.costs.op_time_s.min(axis=1)
    return problem.graph, times


def _gap(
    config: Config, problem: Problem, blocks: Sequence[BlockCost], names: Sequence[str]
) -> str:
    """Return the recomputation time as text, with its optimality gap for plans on one device.

    With tiers there is no gap: the bound ignores the memory freed by what moves there.
    """
    chosen_s = sum(block.again_s for block in blocks if block.name in set(names))
    chosen_text = f", {format_s(chosen_s)}"
    if problem.topology.n_devices > 1 or config.devices.tiers:
        return chosen_text
    whole = Assignment(np.zeros(problem.graph.n_ops, dtype=np.int64), ((0,),))
    peak_bytes = evaluate(problem, whole, search_bounds=False).peak_bytes
    missing_bytes = peak_bytes - int(problem.topology.memory_bytes[0])
    least_s = least_again_s(blocks, missing_bytes)
    if not 0 < least_s < float("inf"):
        return chosen_text
    return f"{chosen_text} (at least {format_s(least_s)}, gap {chosen_s / least_s - 1:.1%})"
