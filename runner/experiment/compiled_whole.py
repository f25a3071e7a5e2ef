"""A plan of ``runtime=compiled`` that leaves all to one device, which compiles the whole model."""

from dataclasses import replace

from fxpart.core.assignment import Assignment
from fxpart.cost.problem import Problem, make_problem
from fxpart.cost.tables import LatencySource
from fxpart.placement.infeasible import whole_model_bytes
from fxpart.placement.search.refine import latency_of
from fxpart.placement.single import single_device
from runner.config.sections import Config
from runner.experiment.runtime import as_kernels, devices_compiled_for
from runner.experiment.subject import Subject, graph_to_place

__all__ = ["compiled_whole"]

_SEARCHES = ("cost_aware", "kl_based", "optimal")
"""Modes that leave devices idle where that is faster."""


def compiled_whole(
    config: Config,
    subject: Subject,
    problem: Problem,
    assignment: Assignment,
    *,
    times: LatencySource,
    searched: Problem,
) -> tuple[Problem, Assignment]:
    """Return a plan and its problem, with kernels across blocks where one device computes all.

    A mode is asked about blocks that are compiled one by one. What a search divided so is left to
    one device where the whole model is faster there.

    Args:
        config: of the run.
        subject: whose operators are fused.
        problem: with blocks compiled one by one.
        assignment: the mode's for it.
        times: of operators.
        searched: `problem` with the memory that the mode was given.

    """
    if config.runtime.name != "compiled" or problem.topology.n_devices == 1:
        return problem, assignment
    is_alone = devices_compiled_for(assignment) == 1
    divides = config.mode.name in _SEARCHES and config.objective == "latency"
    if not is_alone and (not divides or config.schedule.name != "none" or assignment.replicas > 1):
        return problem, assignment
    kernels = as_kernels(config, graph_to_place(config, subject), 1)
    whole = make_problem(kernels, problem.topology, times, config.objective)
    if is_alone:
        devices = list(assignment.devices_of_partition[0])
        room = int(searched.topology.memory_bytes[devices].min())
        return (whole if whole_model_bytes(whole) <= room else problem), assignment
    alone = single_device(replace(whole, topology=searched.topology))
    if alone is None:
        return problem, assignment
    gains = latency_of(whole, alone.device_of) < latency_of(problem, assignment.device_of)
    return (whole, alone) if gains else (problem, assignment)
