"""What Hydra hands to a sweeper: kept until the sweep begins, and read only then."""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from hydra.plugins.sweeper import Sweeper

from fxpart.errors import SpecError, nearest_names
from runner.config.paths import conf_dir

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
        from runner.cli.composing import work_begins
        from runner.sweep.launchers.check_settings import check_launcher

        work_begins()
        _, _, config = self._given
        _check_settings(config)
        check_launcher(config)
        self.work()(*self._given, arguments)


def _check_settings(config: "DictConfig") -> None:
    from omegaconf import DictConfig, OmegaConf

    # A choice of the user's may name a sweeper of ours.
    asked = config.hydra.sweeper
    shipped = map(OmegaConf.load, sorted((conf_dir() / "hydra" / "sweeper").glob("*.yaml")))
    known = next((one for one in shipped if one._target_ == asked.get("_target_")), asked)
    for name in asked:
        if name not in known:
            near = nearest_names(str(name), map(str, known))
            raise SpecError(f"hydra.sweeper.{name} does not exist; {near}")
    params = asked.get("params")
    if params is not None and not isinstance(params, DictConfig):
        raise SpecError(
            f"hydra.sweeper.params={params} must be keys with their values, such as"
            " 'hydra.sweeper.params={devices: \"2x16gb,4x16gb\"}'"
        )
