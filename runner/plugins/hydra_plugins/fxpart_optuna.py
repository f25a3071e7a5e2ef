"""The sweeper ``hydra/sweeper=optuna``, where Hydra looks for plugins. All else is in the runner.

Hydra's own plugin for Optuna wants a version of 2021, and forgets a study when it ends.
"""

from typing import TYPE_CHECKING

from runner.sweep.sweeper import RunnerSweeper

if TYPE_CHECKING:
    from runner.sweep.sweeper import Run

__all__ = ["OptunaSweeper"]


class OptunaSweeper(RunnerSweeper):
    """Runs what Optuna proposes, one go after the other."""

    def work(self) -> "Run":
        """Return what runs the sweep."""
        from runner.sweep.optuna.sweeper import run_optuna

        return run_optuna
