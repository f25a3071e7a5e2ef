"""A run as ``python -m runner`` plans it, for sets whose rows are such runs."""

from benchmarks.composed import composed
from runner.experiment.experiment import plan
from runner.experiment.result import Result
from runner.experiment.subject import model_spec

__all__ = ["planned_run"]


def planned_run(overrides: tuple[str, ...]) -> Result:
    """Return what ``python -m runner`` plans with `overrides`.

    Raises:
        FxpartError: for what cannot be planned.

    """
    config = composed(*overrides)
    return plan(config, model_spec(config))
