"""What one job says in the terminal when it runs alone."""

from pathlib import Path

from runner.batch_report import batch_line
from runner.experiment import Result
from runner.measured import measured_lines
from runner.memory_report import peak_line
from runner.paths import shown_path
from runner.pipeline_schedule import schedule_line
from runner.replicas import replicas_line
from runner.terminal import device_table, show, summary_line

__all__ = ["show_end", "show_plan"]


def show_plan(result: Result) -> None:
    """Print the table of devices, and a line for each thing that was asked for."""
    show(device_table(result.evaluation), summary_line(result.evaluation, result.batch_size))
    show(f"peak:      {peak_line(result.peaks)}")
    if result.measured_on:
        show(f"times:     of operators on {result.measured_on}, the same for every device")
    if result.replicas:
        show(f"replicas:  {replicas_line(result.replicas)}")
    if result.batches:
        show(f"batch:     {batch_line(result.batches)}")
    if result.schedule:
        show(f"schedule:  {schedule_line(result.schedule)}")


def show_end(result: Result, folder: Path) -> None:
    """Print what was measured, and where the files are."""
    if result.measured:
        show(*measured_lines(result.measured))
    show(f"files:     {shown_path(folder)}")
