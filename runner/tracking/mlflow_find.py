"""Finding one run of a store by how its id begins, whichever experiment it is in."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fxpart.errors import SpecError
from runner.config.passwords import without_password
from runner.config.sections import TrackingConfig
from runner.tracking.mlflow_search import run_of_id
from runner.tracking.mlflow_store import reach, refusals, sqlite_path, store_uri

if TYPE_CHECKING:
    from mlflow import MlflowClient

__all__ = ["FoundRun", "find_run", "unknown_run"]

_LEAST = 6
"""Characters of an id that may stand for it."""
_ID = re.compile(r"[0-9A-Za-z]+")
_WHOLE = 32
"""Characters of a whole id."""
_SHOWN = 4


@dataclass(frozen=True, slots=True)
class FoundRun:
    """A run, and the name of the experiment that it is in."""

    run_id: str
    experiment: str


def find_run(config: TrackingConfig, root: Path, beginning: str) -> FoundRun:
    """Return the run whose id begins so, in the store that `config` means; nothing is made.

    Raises:
        SpecError: when there is none, or more than one, or too little is given.
        TrackingError: for a store that cannot be read.

    """
    uri = store_uri(config, root)
    if len(beginning) < _LEAST:
        raise SpecError(
            f"{beginning!r} is too short for a run's id; give its first {_LEAST} characters or more"
        )
    database = sqlite_path(uri)
    if database is not None and not (database.is_file() and database.stat().st_size):
        raise unknown_run(beginning, uri)
    reach(uri)
    from mlflow import MlflowClient  # takes 1 to 2 s

    with refusals(uri):
        client = MlflowClient(tracking_uri=uri)
        found = _found(client, beginning) if _ID.fullmatch(beginning) else []
        if len(found) == 1:
            run_id, experiment_id = found[0]
            return FoundRun(run_id, client.get_experiment(experiment_id).name)
    if not found:
        raise unknown_run(beginning, uri)
    ids = ", ".join(run_id for run_id, _ in sorted(found)[:_SHOWN])
    more = ", ..." if len(found) > _SHOWN else ""
    raise SpecError(f"several runs begin with {beginning!r}; give more of one: {ids}{more}")


def unknown_run(beginning: str, uri: str) -> SpecError:
    """Return the error for an id that no run at `uri` has."""
    return SpecError(
        f"there is no run {beginning!r} at {without_password(uri)}; MLflow shows a run's id in its"
        " page, and tracking.uri= names another store"
    )


def _found(client: "MlflowClient", beginning: str) -> list[tuple[str, str]]:
    """Return the ids of the runs that begin so, one more than are shown, and of experiments."""
    if len(beginning) == _WHOLE:
        run = run_of_id(client, beginning)
        return [(run.info.run_id, run.info.experiment_id)] if run else []
    page = client.search_runs(
        list(_experiment_ids(client)),
        f"attributes.run_id LIKE '{beginning}%'",
        max_results=_SHOWN + 1,
    )
    found = [(run.info.run_id, run.info.experiment_id) for run in page]
    # A store may hold upper and lower case to be the same.
    return [(run_id, experiment) for run_id, experiment in found if run_id.startswith(beginning)]


def _experiment_ids(client: "MlflowClient") -> Iterator[str]:
    token: str | None = None
    while True:
        page: Any = client.search_experiments(page_token=token)
        yield from (experiment.experiment_id for experiment in page)
        token = page.token
        if not token:
            return
