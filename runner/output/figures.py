"""The figures of a run: SVG files that open in any browser, without a network."""

from pathlib import Path

from fxpart.core.assignment import Assignment
from fxpart.core.graph import OpGraph
from fxpart.cost.evaluation import Evaluation
from fxpart.errors import SpecError
from runner.output.memory_plot import memory_svg
from runner.output.partition_plot import partition_overview_svg, partition_plot_svg, suits_boxes
from runner.output.partition_summary import summarise
from runner.output.text_files import write_text

__all__ = [
    "FIGURES",
    "check_figures",
    "memory_svg",
    "partition_graph_svg",
    "wants_figures",
    "wants_traces",
    "write_figures",
]

FIGURES = ("auto", "all", "none")
"""What ``figures=`` may be."""
MOST_OPERATORS = 1000
"""In a sweep ``auto`` draws no larger models: that would take longer than the rest of the job."""


def check_figures(figures: str) -> None:
    """Raise `SpecError` for a choice of figures that does not exist."""
    if figures not in FIGURES:
        raise SpecError(f"figures={figures} does not exist; write {', '.join(FIGURES)}")


def wants_figures(figures: str, operators: int, *, in_sweep: bool) -> bool:
    """Return whether the figures of a model of so many operators are drawn."""
    small = not in_sweep or operators <= MOST_OPERATORS
    return figures == "all" or (figures == "auto" and small)


def wants_traces(figures: str, *, in_sweep: bool) -> bool:
    """Return whether traces are written; those of a thousand jobs would fill a disk."""
    return figures == "all" or (figures == "auto" and not in_sweep)


def partition_graph_svg(graph: OpGraph, assignment: Assignment, evaluation: Evaluation) -> str:
    """Return the partitions in lanes by device, and what is sent between them.

    A few get a labelled box each and labelled arrows; of many only boxes are drawn, and what is
    sent is added up by pair of devices.
    """
    summary = summarise(graph, assignment, evaluation)
    if suits_boxes(summary):
        return partition_plot_svg(summary, assignment, evaluation)
    return partition_overview_svg(summary, evaluation)


def write_figures(
    folder: Path, graph: OpGraph, assignment: Assignment, evaluation: Evaluation
) -> tuple[Path, Path]:
    """Write `memory.svg` and `partition_graph.svg` into `folder`; return their paths.

    The same run gives the same bytes. Raises `CacheError` when the folder cannot be written.
    """
    memory, partitions = folder / "memory.svg", folder / "partition_graph.svg"
    write_text(memory, memory_svg(graph, assignment, evaluation))
    write_text(partitions, partition_graph_svg(graph, assignment, evaluation))
    return memory, partitions
