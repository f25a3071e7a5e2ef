"""The runs that a command logged, read from its store by MLflow's own client."""

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mlflow.entities import Run

__all__ = ["logged_runs"]


def logged_runs(database: Path) -> "list[Run]":
    """Return the runs in all experiments of an SQLite store, except deleted ones."""
    from mlflow.tracking import MlflowClient

    client = MlflowClient(f"sqlite:///{database}")
    experiments = [experiment.experiment_id for experiment in client.search_experiments()]
    runs: list[Run] = []
    page: str | None = None
    while page != "":
        batch = client.search_runs(experiments, page_token=page)
        runs += batch
        page = batch.token or ""
    return runs
