"""Writing one run to MLflow: made, filled and closed, in as few requests as it takes.

Done again with the same record it changes nothing, so that a run whose writing was cut off half-way
is completed, not doubled.
"""

import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from runner.tracking.mlflow_artifacts import LOGGED_ARTIFACTS, Target, keep_artifacts, logged_tables
from runner.tracking.mlflow_database import Database, NewRun, Point, Values
from runner.tracking.mlflow_runs import MlflowRuns
from runner.tracking.mlflow_values import batches, finite_metrics, legal_names, tag_texts
from runner.tracking.open_run import OUTCOME, RECORD, now_ms
from runner.tracking.tracker import UnsentRun

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run

__all__ = ["MadeRun", "Store", "fill_and_close", "find_or_make", "make_run", "write_some"]


class Store(NamedTuple):
    """An open store, and the experiment in it."""

    client: "MlflowClient"
    experiment_id: str
    artifact_location: str
    """Of the experiment, a URI; each run has a folder below."""
    database: Database | None
    """None where the store is a server."""
    runs: MlflowRuns


class MadeRun(NamedTuple):
    """A run that the store knows, and where its files go."""

    run_id: str
    artifact_uri: str


def make_run(
    to: Store,
    name: str,
    tags: Mapping[str, str],
    start_ms: int,
    params: Mapping[str, str] | None = None,
) -> MadeRun:
    """Return a new run, which is RUNNING since `start_ms`, with its tags and parameters."""
    legal, known = tag_texts(tags), params or {}
    if to.database:
        run_id = uuid.uuid4().hex
        place = f"{to.artifact_location}/{run_id}/artifacts"
        new = NewRun(run_id, name or run_id, to.experiment_id, place, start_ms, legal, known)
        to.database.make_run(new)
        return MadeRun(run_id, place)
    made: Run = to.client.create_run(
        to.experiment_id, start_time=start_ms, run_name=name, tags=legal
    )
    _send(to.client, made.info.run_id, [], known, {})
    return MadeRun(made.info.run_id, made.info.artifact_uri)


def find_or_make(to: Store, run: UnsentRun) -> MadeRun:
    """Return the run of this record, made if the store has none.

    It may have one whose id never arrived here: the store went away after it had made it.
    """
    found: list[Run] = to.client.search_runs(
        [to.experiment_id], f"tags.{RECORD} = '{run.record_id}'", max_results=1
    )
    if found:
        return MadeRun(found[0].info.run_id, found[0].info.artifact_uri)
    # Not yet what says that it is complete.
    tags = {key: value for key, value in run.tags.items() if key != OUTCOME}
    return make_run(to, run.name, tags, run.start_ms)


def fill_and_close(to: Store, made: MadeRun, run: UnsentRun, folder: Path) -> None:
    """Log all of `run`, whose artifacts lie relative to `folder`, and close it.

    The tag of the outcome is the last value to arrive: a run that has it has everything.
    """
    artifacts = folder / run.artifacts if run.artifacts is not None else None
    target = Target(to.client, *made)
    keep_artifacts(target, run.tables, artifacts, run.left_out)
    points = [(name, value, run.end_ms, 0) for name, value in run.metrics.items()]
    names = legal_names(run.series)
    for name, series in run.series.items():
        points += [(names[name], value, run.end_ms, step) for step, value in series]
    tags = dict(run.tags)
    if run.tables:
        tags[LOGGED_ARTIFACTS] = logged_tables(run.tables)
    tags[OUTCOME] = tags.pop(OUTCOME)
    if to.database:
        values = Values(run.params, points, tag_texts(tags))
        to.database.close_run(made.run_id, run.status, run.end_ms, values)
    else:
        _send(to.client, made.run_id, points, run.params, tags)
        to.client.set_terminated(made.run_id, run.status, run.end_ms)


def write_some(
    to: Store, run_id: str, metrics: Mapping[str, float], tags: Mapping[str, str]
) -> None:
    """Add metrics, those that are finite, and tags to a run."""
    time_ms = now_ms()
    points = [(name, value, time_ms, 0) for name, value in finite_metrics(metrics).items()]
    _send(to.client, run_id, points, {}, tags)


def _send(
    client: "MlflowClient",
    run_id: str,
    points: Sequence[Point],
    params: Mapping[str, str],
    tags: Mapping[str, str],
) -> None:
    """Send it all in as few requests as it takes: one at a time costs up to 50 times more."""
    from mlflow.entities import Metric, Param, RunTag

    numbers = [Metric(*point) for point in points]
    texts = [Param(key, value) for key, value in params.items()]
    labels = [RunTag(key, value) for key, value in tag_texts(tags).items()]
    for batch in batches(numbers, texts, labels):
        client.log_batch(run_id, batch.metrics, batch.params, batch.tags)
