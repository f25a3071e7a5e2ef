"""The launcher ``hydra/launcher=joblib``, where Hydra looks for plugins. All else is in the runner.

Hydra's own plugin for joblib looks for plugins again before every job, and keeps two configurations
of each until the end.
"""

from typing import TYPE_CHECKING

from runner.sweep.launchers.work import SpreadLauncher

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from hydra.core.utils import JobReturn

    from runner.sweep.launchers.work import Ticket, Work

__all__ = ["JoblibLauncher"]


class JoblibLauncher(SpreadLauncher):
    """Runs the jobs on the cores of this machine."""

    def spread(
        self, work: "Work", tickets: "Sequence[Ticket]"
    ) -> "Iterator[tuple[int, JobReturn]]":
        """Yield each job's number and how it ended, as they end."""
        from runner.sweep.launchers.joblib_workers import over_workers

        return over_workers(work, tickets, self.settings["n_jobs"])
