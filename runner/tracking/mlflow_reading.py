"""Reading the runs of an MLflow store that is there: nothing is made and nothing is written."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from fxpart.errors import nearest_names
from runner.config.passwords import without_password
from runner.config.sections import TrackingConfig
from runner.errors import TrackingError
from runner.tracking.mlflow_database import open_database
from runner.tracking.mlflow_search import DatabaseSearch, Search, ServerSearch
from runner.tracking.mlflow_store import reach, refusals, sqlite_path, store_uri
from runner.tracking.tracker import LoggedRun

if TYPE_CHECKING:
    from mlflow import MlflowClient

__all__ = ["StoredRuns", "open_stored"]


class StoredRuns:
    """The runs of one experiment. All methods raise `TrackingError` when the store fails."""

    def __init__(self, search: Search, uri: str) -> None:
        self._search, self._uri = search, uri

    def runs(self, tags: Mapping[str, str]) -> list[LoggedRun]:
        """Return the runs that have all these tags with these values, the oldest first."""
        with refusals(self._uri):
            return self._search.having(tags)

    def runs_of_sweep(self, sweep_id: str) -> list[LoggedRun]:
        """Return the runs that belong to a sweep, the oldest first."""
        with refusals(self._uri):
            return self._search.containing("sweeps", f" {sweep_id} ")


def open_stored(config: TrackingConfig, root: Path) -> StoredRuns:
    """Return the runs of an experiment as its store has them; `root` is where outputs lie.

    Raises `TrackingError` for a store or an experiment that is not there, or does not answer.
    """
    uri = store_uri(config, root)
    database = sqlite_path(uri)
    if database is not None and not (database.is_file() and database.stat().st_size):
        raise TrackingError(
            f"there are no runs at {database}; run something first, or name another store: --uri"
        )
    reach(uri)
    from mlflow import MlflowClient  # takes 1 to 2 s

    with refusals(uri):
        client = MlflowClient(tracking_uri=uri)
        experiment_id = _experiment_id(client, config.experiment, uri)
        opened = open_database(uri)
    if opened is not None:
        return StoredRuns(DatabaseSearch(opened, experiment_id), uri)
    return StoredRuns(ServerSearch(client, experiment_id), uri)


def _experiment_id(client: "MlflowClient", name: str, uri: str) -> str:
    found = client.get_experiment_by_name(name)
    if found is not None and found.lifecycle_stage != "deleted":
        return str(found.experiment_id)
    names = [experiment.name for experiment in client.search_experiments()]
    raise TrackingError(
        f"there is no experiment {name!r} at {without_password(uri)}; {nearest_names(name, names)}"
    )
