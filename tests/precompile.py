"""``python -m tests.precompile``: compile inner loops before workers of tests do.

A run compiles the loops of its mode and caches them. Workers that start at the same time would
compile the same loops in parallel.
"""

from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from benchmarks.random_problems import brute_force
from fxpart.core.graph import OpGraph, csr
from fxpart.core.partitions import partition_by_device
from fxpart.core.symbolic_graph import OF_OPERATORS, OF_VALUES, SymbolicGraph
from fxpart.cost.bounds import lower_bound_s
from fxpart.cost.caching_allocator import run_allocator
from fxpart.cost.evaluate import evaluate
from fxpart.cost.least_placement import MOST_UNITS
from fxpart.cost.peak_tensors import device_peaks
from fxpart.cost.problem import OBJECTIVES, Problem
from fxpart.cost.roofline import LatencyModel
from fxpart.cost.symbolic.latency import latency_formula
from fxpart.cost.symbolic.peak import peak_formulas
from fxpart.errors import InfeasibleError
from fxpart.placement import make_mode
from fxpart.placement.compile_ahead import chain_problem
from fxpart.placement.published.search import placed_in_steps
from fxpart.placement.search.fill import place_all
from fxpart.placement.search.pairwise import combine_pairs
from fxpart.placement.stages.line import stage_line
from fxpart.placement.stages.step_plan import StepMemory, StepPlan
from fxpart.placement.stages.stretch_bytes import no_bytes
from fxpart.schedule import stage_costs
from fxpart.support.garbage import collect_rarely
from fxpart.torch_compat.accounting.device_map import map_partitions
from fxpart.torch_compat.accounting.latency_modes import cost_aware as static_cost_aware
from fxpart.torch_compat.accounting.latency_modes import kl_based as static_kl_based
from fxpart.torch_compat.accounting.least_latency import least_latency
from fxpart.torch_compat.accounting.problem import StaticGraph, StaticProblem
from fxpart.torch_compat.accounting.size_based import size_based as static_size_based
from fxpart.torch_compat.accounting.sparse_nn import sparse_nn
from tests.placement.workloads import document, problem_of, workload_at
from tests.sketch import GIVEN, installed_modes

__all__ = ["precompile", "run_modes"]


def _three_in_a_row() -> StaticProblem:
    """Return a problem of the drop-in partitioner: three operators, and a source."""
    count = np.array([10, 10, 10], dtype=np.int64)
    read_start, reads = csr([[], [0], [1]])
    source_start, sources = csr([[0], [], []])
    graph = StaticGraph(
        names=("a", "b", "c"),
        total_bytes=count,
        output_bytes=count // 10,
        latency_s=np.ones(3),
        read_start=read_start,
        reads=reads,
        source_bytes=count[:1],
        source_start=source_start,
        sources=sources,
    )
    return StaticProblem(graph, np.array([64, 64], dtype=np.int64), 1.0)


def precompile() -> None:
    """Run every mode that searches, and the evaluation, once.

    On two cores, with few loops in common: two processes that need a loop at the same time would
    both compile it. A given placement runs no loop of its own.
    """
    modes = partial(run_modes, [name for name in installed_modes() if name not in GIVEN])
    with ProcessPoolExecutor(2, mp_context=get_context("fork")) as pool:
        for submitted in [pool.submit(part) for part in (modes, _others)]:
            submitted.result()


def _others() -> None:
    _static()
    _symbolic()
    _staged()
    _bounded()
    _published()


def _static() -> None:
    static = _three_in_a_row()
    for mode in (static_size_based, static_kl_based, static_cost_aware, least_latency):
        mode(static)
    sparse_nn(static, np.array([True, False, False]))
    least_latency(replace(static, memory_bytes=np.array([25, 25])))  # not all on one
    map_partitions(replace(static, memory_bytes=np.array([5, 5])), np.arange(3), 3, [-1, -1, -1])


def _staged() -> None:
    """Run pipelines with schedules, and what reserves their memory."""
    problem = chain_problem(8, (10**6, 10**6))
    make_mode("pipeline")(chain_problem(8, (10**6, 10**6, 10**6)))
    make_mode("pipeline")(chain_problem(8, (5, 5, 5)))
    make_mode("pipeline", {"stages": 2, "schedule": "1f1b", "microbatches": 2})(problem)
    interleaved = {"interleave": 2, "schedule": "interleaved", "microbatches": 4}
    make_mode("pipeline", interleaved)(problem)
    placed = make_mode("pipeline", {"interleave": 2})(problem)
    step = StepMemory(problem, stage_line(problem), [0, 1, 0, 1], StepPlan("interleaved", 4))
    step.peak_bytes(np.array([0, 2, 4, 6, 8]))
    evaluate(problem, placed)
    run_allocator(np.array([600, 700]), np.array([0, 1, -1, -2]))


def _bounded() -> None:
    """Compute the bounds of devices of unlike memory, and what is tried before a refusal."""
    roomy = chain_problem(6, (5, 2, 2))
    lower_bound_s(roomy)
    combine_pairs(roomy)
    place_all(roomy, [3, 3])
    brute_force(roomy)


def _published() -> None:
    with TemporaryDirectory() as folder:
        workload = workload_at(Path(folder), document(0), 3)
    for objective in ("latency", "throughput"):
        placed_in_steps(problem_of(workload, objective), 1, None)


def _symbolic() -> None:
    problem = chain_problem(2, (10**6, 10**6))
    topology, placed = problem.topology, make_mode("pipeline")(problem)
    stage_costs(problem, placed)
    device_peaks(problem, placed)
    stretches = stage_line(problem).stretches
    stretches.known = no_bytes(1)
    stretches.bytes_of(0, 1)  # which fills it
    stretches.make_room()
    symbolic = _any_batch(problem.graph)
    peak_formulas(symbolic, placed, topology.n_devices)
    latency_formula(symbolic, topology, LatencyModel(), placed, [{"batch": 1}, {"batch": 2}])


def run_modes(names: Iterable[str]) -> Problem:
    """Run the modes, and the evaluation, on two operators and on too many to try all plans.

    Returns:
        two operators as a problem.
    """
    problem = chain_problem(2, (10**6, 10**6))
    tight = chain_problem(MOST_UNITS + 4, (10**6, MOST_UNITS // 2))
    partition_by_device(problem.graph, np.array([0, 1], dtype=np.int64))
    for name in names:
        options = {"steps": 6} if name == "optimal" else None
        for placed_problem in (problem, tight):
            for objective in OBJECTIVES:
                subject = replace(placed_problem, objective=objective)
                # A mode that ignores sizes may find no plan for the tight one.
                with suppress(InfeasibleError):
                    evaluate(subject, make_mode(name, options)(subject))
    return problem


def _any_batch(graph: OpGraph) -> SymbolicGraph:
    """Return `graph` as that of a batch of 1."""
    columns = {name: getattr(graph, name)[:, None] for name in (*OF_OPERATORS, *OF_VALUES)}
    batch = np.array([[1]], dtype=np.int64)
    return SymbolicGraph(graph, ("batch",), (1,), batch, columns, -np.ones_like(graph.value_bytes))


if __name__ == "__main__":
    collect_rarely()
    precompile()
