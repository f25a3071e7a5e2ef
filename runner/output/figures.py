"""Choose the figures and traces of a run, and write its two SVG files."""

from pathlib import Path

from fxpart.core.assignment import Assignment
from fxpart.core.graph import OpGraph
from fxpart.cost.evaluation import Evaluation
from fxpart.errors import SpecError
from fxpart.support.text_files import write_text
from runner.output.memory_plot import memory_svg
from runner.output.partition_plot import partition_graph_svg

__all__ = ["check_figures", "wants_figures", "wants_traces", "write_figures"]

_CHOICES = ("auto", "all", "none")
MOST_OPERATORS = 1000
"""Largest model that ``auto`` draws in a sweep: others would take longer than the rest of the job.
"""


def check_figures(figures: str) -> None:
    """Raise `SpecError` for a value of ``figures=`` that does not exist."""
    if figures not in _CHOICES:
        raise SpecError(f"figures={figures} does not exist; write {', '.join(_CHOICES)}")


def wants_figures(figures: str, operators: int, *, in_sweep: bool) -> bool:
    """Return whether to draw the figures of a model with this number of operators."""
    small = not in_sweep or operators <= MOST_OPERATORS
    return figures == "all" or (figures == "auto" and small)


def wants_traces(figures: str, *, in_sweep: bool) -> bool:
    """Return whether to write traces; those of a thousand jobs would fill a disk."""
    return figures == "all" or (figures == "auto" and not in_sweep)


def write_figures(
    folder: Path,
    graph: OpGraph,
    assignment: Assignment,
    evaluation: Evaluation,
    subject: str = "",
) -> None:
    """Write `memory.svg` and `partition_graph.svg` into `folder`.

    `subject` is their first line. Files of equal runs are equal.

    Raises `CacheError` if the folder cannot be written.
    """
    write_text(folder / "memory.svg", memory_svg(graph, assignment, evaluation, subject))
    partitions = partition_graph_svg(graph, assignment, evaluation, subject)
    write_text(folder / "partition_graph.svg", partitions)
