"""What our launchers share: jobs become tickets, and each gets an end, whatever happens to it."""

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.plugins.launcher import Launcher

if TYPE_CHECKING:
    from hydra.core.utils import JobReturn
    from hydra.types import HydraContext, TaskFunction
    from omegaconf import DictConfig

    from runner.launchers.work import Ticket, Work

__all__ = ["SpreadLauncher"]


class SpreadLauncher(Launcher):
    """A launcher that has other processes run the jobs."""

    def __init__(self, **settings: object) -> None:
        """Keep what the configuration says, in `settings`, as plain values."""
        from omegaconf import OmegaConf

        self.settings: dict[str, Any] = {
            name: OmegaConf.to_container(value, resolve=True)
            if OmegaConf.is_config(value)
            else value
            for name, value in settings.items()
        }

    def setup(
        self,
        *,
        hydra_context: "HydraContext",
        task_function: "TaskFunction",
        config: "DictConfig",
    ) -> None:
        """Keep what Hydra hands over."""
        self.hydra_context, self.task_function, self.config = hydra_context, task_function, config

    def launch(
        self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int
    ) -> list["JobReturn"]:
        """Run the jobs and return how each ended, in their order.

        A job whose process dies has failed with `LostJobError`; the others go on.

        Raises:
            FxpartError: where no job can be started at all.

        """
        # Hydra imports every launcher, for `--help` too: what one needs is imported when it runs.
        from runner.launchers.work import LostJobError, Ticket, failed, pack

        Path(str(self.config.hydra.sweep.dir)).mkdir(parents=True, exist_ok=True)
        tickets = [
            Ticket(initial_job_idx + at, tuple(overrides))
            for at, overrides in enumerate(job_overrides)
        ]
        work = pack(self.hydra_context, self.config, self.task_function)
        ends = dict(self.spread(work, tickets))
        silent = LostJobError("its process ended without a result")
        return [ends.get(one.index) or failed(one, silent) for one in tickets]

    @abstractmethod
    def spread(
        self, work: "Work", tickets: Sequence["Ticket"]
    ) -> Iterator[tuple[int, "JobReturn"]]:
        """Yield each job's number and how it ended, as they end."""
