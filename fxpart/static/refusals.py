"""What to say when no plan is found: needed bytes, present bytes, and what to change."""

from fxpart.errors import InfeasibleError
from fxpart.graph import IntArray
from fxpart.static.graph import StaticProblem

__all__ = ["no_plan", "too_large_alone"]


def too_large_alone(problem: StaticProblem, alone_bytes: IntArray) -> InfeasibleError | None:
    """Return the error that names an operator too large for every device, or None if all fit one.

    `alone_bytes` is what each operator needs with all that it reads, shape (n,).
    """
    worst, largest = int(alone_bytes.argmax()), int(problem.memory_bytes.max())
    needed = int(alone_bytes[worst])
    if needed <= largest:
        return None
    return InfeasibleError(
        f"operator {problem.graph.names[worst]} is too large to fit any device: with what it reads"
        f" it needs {needed} bytes, the largest device has {largest};"
        " give a larger device or split the operator",
        needed_bytes=needed,
        available_bytes=largest,
    )


def no_plan(problem: StaticProblem, advice: str) -> InfeasibleError:
    """Return the error that says how much there is and would be needed; it ends with `advice`."""
    graph, memory = problem.graph, problem.memory_bytes
    needed, present = int(graph.total_bytes.sum() + graph.source_bytes.sum()), int(memory.sum())
    return InfeasibleError(
        f"no valid mapping of partitions to the {len(memory)} devices was found: the graph needs"
        f" {needed} bytes held once, and more where operators on different devices read the same;"
        f" there are {present} in all; {advice}",
        needed_bytes=needed,
        available_bytes=present,
    )
