"""The sweeper ``hydra/sweeper=grid``, where Hydra looks for plugins. All else is in the runner."""

from typing import TYPE_CHECKING

from hydra.plugins.sweeper import Sweeper

if TYPE_CHECKING:
    from hydra.types import HydraContext, TaskFunction
    from omegaconf import DictConfig

__all__ = ["GridSweeper"]


class GridSweeper(Sweeper):
    """Runs every combination, but for what ``where=`` leaves out and what is settled already."""

    def __init__(self, params: object = None) -> None:
        """Take `params`, which are read from the configuration itself when the sweep begins."""

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
        """Run the sweep that the command line asks for."""
        from runner.sweeps.grid import run_grid

        run_grid(*self._given, arguments)
