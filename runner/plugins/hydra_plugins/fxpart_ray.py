"""The launcher ``hydra/launcher=ray``, where Hydra looks for plugins. All else is in the runner.

Hydra's own plugin for Ray wants a cloudpickle of before 3, which joblib and MLflow no longer take,
and keeps every result.
"""

from typing import TYPE_CHECKING

from runner.sweep.launchers.work import SpreadLauncher

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from hydra.core.utils import JobReturn

    from runner.sweep.launchers.work import Ticket, Work

__all__ = ["RayLauncher"]


class RayLauncher(SpreadLauncher):
    """Runs each job as a task of a Ray cluster."""

    def spread(
        self, work: "Work", tickets: "Sequence[Ticket]"
    ) -> "Iterator[tuple[int, JobReturn]]":
        """Yield each job's number and how it ended, as they end."""
        from runner.sweep.launchers.ray_apart import over_ray_apart

        return over_ray_apart(work, tickets, self.settings["init"], self.settings["remote"])
