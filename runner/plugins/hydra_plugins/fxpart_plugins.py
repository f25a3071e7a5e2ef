"""The sweepers and launchers of fxpart, where Hydra looks for plugins; the work is the runner's.

Hydra imports this for every command, ``--help`` too: what a plugin needs is imported when it runs.
Why not Hydra's own: that for joblib looks for plugins again before every job and keeps two
configurations of each until the end; that for Ray wants a cloudpickle of before 3, which joblib and
MLflow no longer take; that for submitit starts a process for each job, locally all at once, and
leaves them running when the sweep is interrupted; that for Optuna wants a version of 2021, and
forgets a study when it ends.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.plugins.launcher import Launcher
from hydra.plugins.sweeper import Sweeper

if TYPE_CHECKING:
    from hydra.core.utils import JobReturn
    from hydra.types import HydraContext, TaskFunction
    from omegaconf import DictConfig

    from runner.sweep.launchers.work import Ticket, Work

    Ends = Iterator[tuple[int, JobReturn]]

__all__ = [
    "GridSweeper",
    "JoblibLauncher",
    "LocalLauncher",
    "OptunaSweeper",
    "RayLauncher",
    "RunnerSweeper",
    "SlurmLauncher",
    "SpreadLauncher",
]

Run = Callable[["HydraContext", Callable[[Any], Any], "DictConfig", Sequence[str]], None]
"""Runs the sweep of a command line, its last argument."""


class RunnerSweeper(Sweeper):
    """Keeps what Hydra hands over until the sweep begins."""

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
        from runner.sweep.check_settings import check_launcher, check_sweeper

        work_begins()
        _, _, config = self._given
        check_sweeper(config)
        check_launcher(config)
        self.work()(*self._given, arguments)


class GridSweeper(RunnerSweeper):
    """Runs every combination, but for what ``where=`` leaves out and what has a result already."""

    def work(self) -> Run:
        """Return what runs the sweep."""
        from runner.sweep.grid import run_grid

        return run_grid


class OptunaSweeper(RunnerSweeper):
    """Runs what Optuna proposes, one go after the other."""

    def work(self) -> Run:
        """Return what runs the sweep."""
        from runner.sweep.optuna.sweeper import run_optuna

        return run_optuna


class SpreadLauncher(Launcher):
    """A launcher that has other processes run the jobs; each gets an end, whatever happens."""

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
        from runner.sweep.launchers.work import LostJobError, Ticket, failed, pack

        Path(str(self.config.hydra.sweep.dir)).mkdir(parents=True, exist_ok=True)
        tickets = [
            Ticket(initial_job_idx + at, tuple(overrides))
            for at, overrides in enumerate(job_overrides)
        ]
        work = pack(self.hydra_context, self.config, self.task_function)
        ends = dict(self.spread(work, tickets))
        silent = LostJobError("its process ended without a result")
        return [ends.get(ticket.index) or failed(ticket, silent) for ticket in tickets]

    @abstractmethod
    def spread(self, work: "Work", tickets: "Sequence[Ticket]") -> "Ends":
        """Yield each job's number and how it ended, as they end."""


class JoblibLauncher(SpreadLauncher):
    """Runs the jobs on the cores of this machine."""

    def spread(self, work: "Work", tickets: "Sequence[Ticket]") -> "Ends":
        """Yield each job's number and how it ended, as they end."""
        from runner.sweep.launchers.joblib_workers import over_workers

        return over_workers(work, tickets, self.settings["n_jobs"])


class RayLauncher(SpreadLauncher):
    """Runs each job as a task of a Ray cluster."""

    def spread(self, work: "Work", tickets: "Sequence[Ticket]") -> "Ends":
        """Yield each job's number and how it ended, as they end."""
        from runner.sweep.launchers.ray_apart import over_ray_apart

        return over_ray_apart(work, tickets, self.settings["init"], self.settings["remote"])


class SlurmLauncher(SpreadLauncher):
    """Runs the jobs as one job array of Slurm."""

    def spread(self, work: "Work", tickets: "Sequence[Ticket]") -> "Ends":
        """Yield each job's number and how it ended, as they end."""
        from runner.sweep.launchers.submitit_jobs import over_slurm

        return over_slurm(work, tickets, self.settings)


class LocalLauncher(SpreadLauncher):
    """Runs the jobs as Slurm would, in processes of this machine."""

    def spread(self, work: "Work", tickets: "Sequence[Ticket]") -> "Ends":
        """Yield each job's number and how it ended, as they end."""
        from runner.sweep.launchers.submitit_jobs import over_local

        return over_local(work, tickets, self.settings)
