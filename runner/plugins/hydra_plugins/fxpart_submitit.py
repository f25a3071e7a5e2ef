"""The launchers ``hydra/launcher=submitit_slurm`` and ``submitit_local``, where Hydra looks.

Hydra's own plugin for submitit starts a process for each job, locally all at once, and leaves them
running when the sweep is interrupted. All else is in the runner.
"""

from typing import TYPE_CHECKING

from runner.sweep.launchers.work import SpreadLauncher

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from hydra.core.utils import JobReturn

    from runner.sweep.launchers.work import Ticket, Work

__all__ = ["LocalLauncher", "SlurmLauncher"]


class SlurmLauncher(SpreadLauncher):
    """Runs the jobs as one job array of Slurm."""

    def spread(
        self, work: "Work", tickets: "Sequence[Ticket]"
    ) -> "Iterator[tuple[int, JobReturn]]":
        """Yield each job's number and how it ended, as they end."""
        from runner.sweep.launchers.submitit_jobs import over_slurm

        return over_slurm(work, tickets, self.settings)


class LocalLauncher(SpreadLauncher):
    """Runs the jobs as Slurm would, in processes of this machine."""

    def spread(
        self, work: "Work", tickets: "Sequence[Ticket]"
    ) -> "Iterator[tuple[int, JobReturn]]":
        """Yield each job's number and how it ended, as they end."""
        from runner.sweep.launchers.submitit_jobs import over_local

        return over_local(work, tickets, self.settings)
