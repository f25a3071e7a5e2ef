"""The sweeper ``hydra/sweeper=grid``, where Hydra looks for plugins. All else is in the runner."""

from typing import TYPE_CHECKING

from runner.sweep.sweeper import RunnerSweeper

if TYPE_CHECKING:
    from runner.sweep.sweeper import Run

__all__ = ["GridSweeper"]


class GridSweeper(RunnerSweeper):
    """Runs every combination, but for what ``where=`` leaves out and what is settled already."""

    def work(self) -> "Run":
        """Return what runs the sweep."""
        from runner.sweep.grid import run_grid

        return run_grid
