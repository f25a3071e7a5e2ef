"""What Hydra hands to a sweeper: kept until the sweep begins, and read only then."""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from hydra.plugins.sweeper import Sweeper

if TYPE_CHECKING:
    from hydra.types import HydraContext, TaskFunction
    from omegaconf import DictConfig

__all__ = ["Run", "RunnerSweeper"]

Run = Callable[["HydraContext", Callable[[Any], Any], "DictConfig", Sequence[str]], None]
"""Runs the sweep of a command line, its last argument."""


class RunnerSweeper(Sweeper):
    """A plugin of Hydra whose work a function of the runner does."""

    def __init__(self, **settings: object) -> None:
        """Take `settings`, which are read from the configuration itself when the sweep begins."""

    @abstractmethod
    def work(self) -> Run:
        """Return what runs the sweep; what that needs is imported here."""

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
        self.work()(*self._given, arguments)
