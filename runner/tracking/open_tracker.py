"""Open the tracker that a configuration names."""

from pathlib import Path

from fxpart.errors import SpecError, nearest_names
from runner.config.sections import TrackingConfig
from runner.tracking.no_tracker import NoTracker
from runner.tracking.tracker import Tracker

__all__ = ["open_tracker"]

_NAMES = ("mlflow", "none")


def open_tracker(config: TrackingConfig, root: Path, *, must_answer: bool = True) -> Tracker:
    """Return the tracker that `config` names, its store ready; `root` is where outputs lie.

    A process opens a store once, and gets the same tracker for it again. Where the store need not
    answer, as for a job of a sweep that is under way, it is looked for again with each run.

    Raises `SpecError` for an unknown name and `TrackingError` for a store that does not work.
    """
    if config.name == "none":
        return NoTracker()
    if config.name != "mlflow":
        near = nearest_names(config.name, _NAMES)
        raise SpecError(f"there is no tracking {config.name!r}; {near}; choose one with tracking=")
    from runner.tracking.mlflow_tracker import shared_tracker  # MLflow takes 1 to 2 s

    return shared_tracker(config, root, must_answer=must_answer)
