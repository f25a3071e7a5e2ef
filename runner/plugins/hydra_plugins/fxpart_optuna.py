"""The sweeper ``hydra/sweeper=optuna``, where Hydra looks for plugins. All else is in the runner.

Hydra's own plugin for Optuna wants a version of 2021, and forgets a study when it ends.
"""

from typing import TYPE_CHECKING

from hydra.plugins.sweeper import Sweeper

if TYPE_CHECKING:
    from hydra.types import HydraContext, TaskFunction
    from omegaconf import DictConfig

__all__ = ["OptunaSweeper"]


class OptunaSweeper(Sweeper):
    """Runs what Optuna proposes, one go after the other."""

    def __init__(self, **settings: object) -> None:
        """Take `settings`, which are read from the configuration itself when the sweep begins."""

    def setup(
        self,
        *,
        hydra_context: "HydraContext",
        task_function: "TaskFunction",
        config: "DictConfig",
    ) -> None:
        """Keep what Hydra hands over."""
        self._given = (hydra_context, task_function, config)

    def sweep(self, arguments: list[str]) -> None:
        """Search for the best of what the command line asks for."""
        from runner.sweeps.optuna_sweeper import run_optuna

        run_optuna(*self._given, arguments)
