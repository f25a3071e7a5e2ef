"""``checkpointing=budget``: the least recomputation of blocks with which a training step fits."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from fxpart.core.assignment import Assignment
from fxpart.core.graph import FloatArray, OpGraph
from fxpart.cost.evaluate import evaluate
from fxpart.cost.problem import Problem
from fxpart.cost.recomputation import BlockCost, block_costs, chosen_blocks, least_again_s
from fxpart.errors import InfeasibleError
from runner.config.sections import Config
from runner.experiment.experiment import plan, problem_of
from runner.experiment.model_spec import model_spec
from runner.experiment.subject import shared_subject
from runner.output.terminal import counted, progress
from runner.output.units import format_s

__all__ = ["within_budget"]


def within_budget(config: Config) -> tuple[Config, str]:
    """Return the configuration of the step that computes least again, and what was found.

    Raises:
        InfeasibleError: where the step does not fit with all blocks computed again.
        FxpartError: for anything else that the user can mend.

    """
    kept = replace(config, checkpointing="none")
    if _fits(kept):
        return kept, "nothing is computed again, the step fits"
    again = replace(config, checkpointing="block")
    plan(again, model_spec(again))  # else it says what would fit
    problems = [_problem(step) for step in (kept, again)]
    blocks = block_costs(_block_paths(again), _timed(problems[0]), _timed(problems[1]))
    tried = 0

    def fits(names: Sequence[str]) -> bool:
        nonlocal tried
        tried += 1
        with progress(f"computing {counted(len(names), 'block')} again"):
            return _fits(replace(again, recomputed_blocks=list(names)))

    names = chosen_blocks(blocks, fits)
    line = f"{len(names)} of {counted(len(blocks), 'block')} computed again"
    return replace(again, recomputed_blocks=list(names)), line + _gap(
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
    """Return the graph, and the time of each operator on the device that is fastest at it."""
    times: FloatArray = problem.costs.op_time_s.min(axis=1)
    return problem.graph, times


def _gap(
    config: Config, problem: Problem, blocks: Sequence[BlockCost], names: Sequence[str]
) -> str:
    """Return how far the choice may be from the best, where one device holds the whole step.

    Of states beside it nothing is known: they make room that the bound does not count.
    """
    chosen_s = sum(block.again_s for block in blocks if block.name in set(names))
    taken = f", {format_s(chosen_s)}"
    if problem.topology.n_devices > 1 or config.devices.tiers:
        return taken
    whole = Assignment(np.zeros(problem.graph.n_ops, dtype=np.int64), ((0,),))
    missing_bytes = evaluate(problem, whole).peak_bytes - int(problem.topology.memory_bytes[0])
    least_s = least_again_s(blocks, missing_bytes)
    if not 0 < least_s < float("inf"):
        return taken
    return f"{taken} (at least {format_s(least_s)}, gap {chosen_s / least_s - 1:.1%})"
