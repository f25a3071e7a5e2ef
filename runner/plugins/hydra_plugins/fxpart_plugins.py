"""The sweepers and launchers of fxpart as Hydra plugins; the runner does the work.

Hydra imports this module for every command, even ``--help``, so plugins import what they need only
when they run.

Why not Hydra's own plugins: joblib's scans for plugins again before every job and keeps two
configurations of each job until the end. Ray's needs cloudpickle < 3, which joblib and MLflow no
longer support. submitit's starts a process for each job, locally all at once, and leaves them
running when the sweep is interrupted. Optuna's needs a version from 2021, and loses a study when it
ends.
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

    from runner.sweep.launchers.tickets import Ticket, Work

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
"""A function that runs the sweep of a command line, its last argument."""


class RunnerSweeper(Sweeper):
    """Base of sweepers: stores Hydra's objects until the sweep begins."""

    def __init__(self, **settings: object) -> None:
        """Ignore `settings`: they are read from the configuration when the sweep begins."""

    @abstractmethod
    def work(self) -> Run:
        """Import and return the function that runs the sweep."""

    def setup(
        self,
        *,
        hydra_context: "HydraContext",
        task_function: "TaskFunction",
        config: "DictConfig",
    ) -> None:
        """Store Hydra's objects."""
        self._given = (hydra_context, task_function, config)

    def sweep(self, arguments: list[str]) -> None:
        """Run the sweep of the command line."""
        from runner.cli.composing import work_begins
        from runner.sweep.check_settings import check_launcher, check_sweeper

        work_begins()
        _, _, config = self._given
        check_sweeper(config)
        check_launcher(config)
        self.work()(*self._given, arguments)


class GridSweeper(RunnerSweeper):
    """Runs all combinations, except those that ``where=`` excludes or that have a result."""

    def work(self) -> Run:
        """Import and return the function that runs the sweep."""
        from runner.sweep.grid import run_grid

        return run_grid


class OptunaSweeper(RunnerSweeper):
    """Runs the jobs that Optuna proposes, batch by batch."""

    def work(self) -> Run:
        """Import and return the function that runs the sweep."""
        from runner.sweep.optuna.sweeper import run_optuna

        return run_optuna


class SpreadLauncher(Launcher):
    """Base of launchers that run jobs in other processes; every job gets a result in any case."""

    def __init__(self, **settings: object) -> None:
        """Store the launcher's `settings` as plain values."""
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
        """Store Hydra's objects."""
        self.hydra_context, self.task_function, self.config = hydra_context, task_function, config

    def launch(
        self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int
    ) -> list["JobReturn"]:
        """Run the jobs and return their results, in the order of the jobs.

        A job whose process dies fails with `LostJobError`; the others continue.

        Raises:
            FxpartError: if no job can be started at all.

        """
        from runner.sweep.launchers.tickets import LostJobError, Ticket, failed, pack

        Path(str(self.config.hydra.sweep.dir)).mkdir(parents=True, exist_ok=True)
        tickets = [
            Ticket(initial_job_idx + index, tuple(overrides))
            for index, overrides in enumerate(job_overrides)
        ]
        work = pack(self.hydra_context, self.config, self.task_function)
        ends = dict(self.spread(work, tickets))
        silent = LostJobError("its process ended without a result")
        return [ends.get(ticket.index) or failed(ticket, silent) for ticket in tickets]

    @abstractmethod
    def spread(self, work: "Work", tickets: "Sequence[Ticket]") -> "Ends":
        """Yield the index and result of each job as it ends."""


class JoblibLauncher(SpreadLauncher):
    """Runs the jobs on the cores of this machine."""

    def spread(self, work: "Work", tickets: "Sequence[Ticket]") -> "Ends":
        """Yield the index and result of each job as it ends."""
        from runner.sweep.launchers.joblib_workers import over_workers

        return over_workers(work, tickets, self.settings["n_jobs"])


class RayLauncher(SpreadLauncher):
    """Runs each job as a task of a Ray cluster."""

    def spread(self, work: "Work", tickets: "Sequence[Ticket]") -> "Ends":
        """Yield the index and result of each job as it ends."""
        from runner.sweep.launchers.ray_apart import over_ray_apart

        return over_ray_apart(work, tickets, self.settings["init"], self.settings["remote"])


class SlurmLauncher(SpreadLauncher):
    """Runs the jobs as one Slurm job array."""

    def spread(self, work: "Work", tickets: "Sequence[Ticket]") -> "Ends":
        """Yield the index and result of each job as it ends."""
        from runner.sweep.launchers.submitit_jobs import over_slurm

        return over_slurm(work, tickets, self.settings)


class LocalLauncher(SpreadLauncher):
    """Runs the jobs in processes of this machine, in the way of the Slurm launcher."""

    def spread(self, work: "Work", tickets: "Sequence[Ticket]") -> "Ends":
        """Yield the index and result of each job as it ends."""
        from runner.sweep.launchers.submitit_jobs import over_local

        return over_local(work, tickets, self.settings)
