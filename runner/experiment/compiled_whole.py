"""Plans of ``runtime=compiled`` on a single device, which compiles the whole model at once."""

from dataclasses import replace

from fxpart.core.assignment import Assignment
from fxpart.cost.problem import Problem, make_problem
from fxpart.cost.tables import LatencySource
from fxpart.placement.infeasible import whole_model_bytes
from fxpart.placement.search.refine import latency_of
from fxpart.placement.single import single_device
from runner.config.schema import Config
from runner.experiment.runtime import as_kernels, devices_compiled_for
from runner.experiment.subject import Subject, graph_to_place
from runner.experiment.whole_modules import SEARCHES

__all__ = ["compiled_whole"]


def compiled_whole(
    config: Config,
    subject: Subject,
    problem: Problem,
    assignment: Assignment,
    *,
    times: LatencySource,
    searched: Problem,
) -> tuple[Problem, Assignment]:
    """Return a plan and its problem, with kernels fused across blocks if one device runs all.

    Modes place blocks that are compiled one by one. A plan that a search divided this way is
    replaced by one on a single device if the whole model, compiled at once, is faster there.

    Args:
        config: the run's configuration.
        subject: the model whose operators are fused.
        problem: the problem with blocks compiled one by one.
        assignment: the mode's placement of it.
        times: the source of operator times.
        searched: `problem` with the memory that the mode was given.

    """
    runtime = config.runtime
    if runtime.name != "compiled" or runtime.regional or problem.topology.n_devices == 1:
        return problem, assignment
    is_alone = devices_compiled_for(assignment) == 1
    divides = config.mode.name in SEARCHES and config.objective == "latency"
    if not is_alone and (not divides or config.schedule.name != "none" or assignment.replicas > 1):
        return problem, assignment
    kernels = as_kernels(config, graph_to_place(config, subject), 1)
    whole = make_problem(kernels, problem.topology, times, config.objective)
    if is_alone:
        devices = list(assignment.devices_of_partition[0])
        memory_bytes = int(searched.topology.memory_bytes[devices].min())
        return (whole if whole_model_bytes(whole) <= memory_bytes else problem), assignment
    on_one_device = single_device(replace(whole, topology=searched.topology))
    if on_one_device is None:
        return problem, assignment
    gains = latency_of(whole, on_one_device.device_of) < latency_of(problem, assignment.device_of)
    return (whole, on_one_device) if gains else (problem, assignment)
