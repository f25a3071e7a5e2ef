"""Find the runs of an MLflow store, and mark those without a result.

MLflow's search joins conditions only with "and". It takes 5 ms, plus 1 ms per run found.
"""

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fxpart.errors import SpecError, nearest_names
from runner.config.passwords import without_password
from runner.config.schema import TrackingConfig
from runner.errors import TrackingError
from runner.tracking.mlflow_opening import Store
from runner.tracking.mlflow_store import has_content, reach, refusals, sqlite_path, store_uri
from runner.tracking.mlflow_values import tag_texts
from runner.tracking.tracker import LoggedRun, Runs
from runner.tracking.unsent import OUTCOME

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run

__all__ = ["PARENT", "FoundRun", "MlflowRuns", "find_run", "open_stored", "unknown_run"]

PARENT, SWEEPS = "mlflow.parentRunId", "sweeps"
_SETTLED = {"finished": "FINISHED", "infeasible": "FAILED", "not_applicable": "FINISHED"}
"""Final outcomes, with the status of their runs."""
_ONGOING = ("RUNNING", "SCHEDULED")
_SWEEPS_CHARS = 7900
"""Most characters of the tag with a run's sweeps. Stores accept 8,000, that is some 460 sweeps."""
_PAGE = 1000
_FEW = 8
"""Up to this number of tag values, each is searched by itself."""
_READ_PER_VALUE = 4
"""For more values, runs to read per value at most before each value is searched by itself."""


class MlflowRuns(Runs):
    """The runs of one experiment; see `Runs` for the methods."""

    def __init__(self, store: Store | None) -> None:
        """Read from `store`; None for a tracker that opens it on first use."""
        self._opened = store

    @contextmanager
    def _store(self) -> Iterator[Store]:
        """Yield the store. Raises `TrackingError` if it fails in the block."""
        assert self._opened is not None, "who opens it later overrides this"
        with refusals(self._opened.uri):
            yield self._opened

    def run(self, run_id: str) -> LoggedRun:
        """Return one run. Raises `SpecError` if the id is unknown."""
        with self._store() as store:
            stored = _stored_run(store.client, run_id)
        if stored is None:
            raise unknown_run(run_id, store.uri)
        return _logged_run(stored)

    def runs(self, tags: Mapping[str, str], status: str | None = None) -> list[LoggedRun]:
        """Return the runs with these tags, and with `status` if given, oldest first."""
        of_status = f"attributes.status = '{status}'" if status else ""
        condition = " and ".join(filter(None, [_condition(tags), of_status]))
        with self._store() as store:
            runs = _search(store, condition)
            return _oldest_first(run for run in runs if tags.items() <= run.tags.items())

    def runs_of_sweep(self, sweep_id: str) -> list[LoggedRun]:
        """Return the runs that belong to a sweep, including shared ones, oldest first."""
        condition = f"tags.kind = 'run' and tags.{SWEEPS} LIKE '% {sweep_id} %'"
        with self._store() as store:
            return _oldest_first(_search(store, condition))

    def settled(
        self,
        tag: str,
        values: Collection[str],
        stands: Callable[[LoggedRun], bool] = lambda _run: True,
    ) -> dict[str, LoggedRun]:
        """Return the newest run with a result that `stands`, by value of `tag`.

        Runs whose process died after logging the result, but before ending, are ended here.
        """
        narrowed = [_condition({OUTCOME: outcome}) for outcome in _SETTLED]
        with self._store() as store:
            results = [run for run in _having(store, tag, values, narrowed) if _is_settled(run)]
            newest = {run.tags[tag]: run for run in results if stands(run)}
            _end(store.client, newest.values())
        return newest

    def unfinished(self, tag: str, values: Collection[str]) -> list[LoggedRun]:
        """Return the runs with one of these values and no result, oldest first.

        Runs whose process died after logging the result, but before ending, are ended here.
        """
        with self._store() as store:
            runs = _having(store, tag, values, ["attributes.status != 'FINISHED'"])
            _end(store.client, (run for run in runs if _is_settled(run)))
        return [run for run in runs if not _is_settled(run)]

    def mark_cut_off(self, run_id: str, reason: str) -> None:
        """Mark a run whose process died. Repeating it after a kill half-way completes the mark.

        The kind, which finds such runs, changes last.
        """
        with self._store() as store:
            _leave_sweep(store.client, run_id, "cut_off_from", {"error": reason})
            store.client.set_terminated(run_id, "KILLED")
            _tag(store.client, run_id, {OUTCOME: "cut_off", "kind": "cut_off"})

    def supersede(self, run_id: str) -> None:
        """Remove a failed run from its sweep, keeping its status and error."""
        with self._store() as store:
            _leave_sweep(store.client, run_id, "superseded_in", {})
            _tag(store.client, run_id, {"kind": "superseded"})

    def join_sweep(self, run_ids: Sequence[str], sweep_id: str) -> None:
        """Add a sweep to the tag of each run that lacks it.

        If two sweeps join a run at once, a SQLite file keeps both. In other stores one sweep may
        miss the run in its tables, until it is started again.
        """
        with self._store() as store:
            for run_id in run_ids:
                with store.writing():
                    sweeps = store.client.get_run(run_id).data.tags.get(SWEEPS, "").split()
                    if sweep_id not in sweeps and len(" ".join(sweeps)) + 2 < _SWEEPS_CHARS:
                        store.client.set_tag(run_id, SWEEPS, f" {' '.join([*sweeps, sweep_id])} ")


def _end(client: "MlflowClient", settled: Iterable[LoggedRun]) -> None:
    """End the runs with a result that are still open."""
    for run in settled:
        if run.status in _ONGOING:
            client.set_terminated(run.run_id, _SETTLED[run.tags[OUTCOME]])


def _leave_sweep(client: "MlflowClient", run_id: str, was_in: str, tags: Mapping[str, str]) -> None:
    """Move the parent's id to another tag, so that no table of the sweep's runs counts the run."""
    parent = client.get_run(run_id).data.tags.get(PARENT)
    _tag(client, run_id, {**tags, **({was_in: parent} if parent else {})})
    if parent:
        client.delete_tag(run_id, PARENT)


def _tag(client: "MlflowClient", run_id: str, tags: Mapping[str, str]) -> None:
    from mlflow.entities import RunTag

    texts = tag_texts(tags)
    client.log_batch(run_id, tags=[RunTag(key, text) for key, text in texts.items()])


# Searches.


def _having(
    store: Store, tag: str, values: Collection[str], narrowed: Sequence[str]
) -> list[LoggedRun]:
    """Return the runs (no sweeps) whose `tag` has one of `values`, oldest first.

    Runs that meet none of the conditions `narrowed` may be left out.
    """
    distinct = dict.fromkeys(values)
    runs = _read_through(store, narrowed, len(distinct)) if len(distinct) > _FEW else None
    if runs is None:
        conditions = [_condition({"kind": "run", tag: value}) for value in distinct]
        runs = [run for condition in conditions for run in _search(store, condition)]
    return _oldest_first(run for run in runs if run.tags.get(tag) in distinct)


def _read_through(store: Store, conditions: Sequence[str], values: int) -> list[LoggedRun] | None:
    """Return all runs (no sweeps) that meet one of the conditions; None if there are too many."""
    limit = _READ_PER_VALUE * values
    runs: list[LoggedRun] = []
    for condition in conditions:
        page_size = limit + 1 - len(runs)
        runs += islice(_search(store, f"tags.kind = 'run' and {condition}", page_size), page_size)
        if len(runs) > limit:
            return None
    return runs


def _search(store: Store, condition: str, page_size: int = _PAGE) -> Iterator[LoggedRun]:
    """Yield the active runs that meet `condition`, oldest first, up to `page_size` per request."""
    token: str | None = None
    while True:
        page: Any = store.client.search_runs(
            [store.experiment_id],
            condition,
            max_results=min(page_size, _PAGE),
            order_by=["attributes.start_time ASC"],
            page_token=token,
        )
        yield from map(_logged_run, page)
        token = page.token
        if not token:
            return


def _stored_run(client: "MlflowClient", run_id: str) -> "Run | None":
    from mlflow.exceptions import MlflowException

    try:
        return client.get_run(run_id)
    except MlflowException as error:
        if error.error_code in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"):
            return None
        raise


def _logged_run(run: "Run") -> LoggedRun:
    info, data = run.info, run.data
    return LoggedRun(
        run_id=info.run_id,
        name=info.run_name or "",
        status=info.status,
        params=data.params,
        metrics=data.metrics,
        tags=data.tags,
        start_ms=info.start_time,
        end_ms=info.end_time,
    )


def _is_settled(run: LoggedRun) -> bool:
    return run.tags.get(OUTCOME) in _SETTLED


def _oldest_first(runs: Iterable[LoggedRun]) -> list[LoggedRun]:
    return sorted(runs, key=lambda run: (run.start_ms, run.run_id))


def _condition(tags: Mapping[str, str]) -> str:
    """Return the search condition for these tags, without values that have both kinds of quotes."""
    quoted = {
        tag: next((f"{quote}{value}{quote}" for quote in "'\"" if quote not in value), None)
        for tag, value in tags.items()
    }
    return " and ".join(f"tags.`{tag}` = {value}" for tag, value in quoted.items() if value)


# Reading an existing store: nothing is created.


def open_stored(config: TrackingConfig, root: Path) -> MlflowRuns:
    """Return the runs of an existing experiment; `root` is the folder of ``outputs``.

    Raises `TrackingError` if the store or the experiment does not exist, or does not answer.
    """
    uri = store_uri(config, root)
    database = sqlite_path(uri)
    if database is not None and not has_content(database):
        raise TrackingError(
            f"there are no runs at {database}; run something first, or name another store: --uri"
        )
    client = _client(uri)
    with refusals(uri):
        experiment = client.get_experiment_by_name(config.experiment)
        if experiment is not None and experiment.lifecycle_stage != "deleted":
            return MlflowRuns(Store(client, uri, experiment.experiment_id))
        names = [experiment.name for experiment in client.search_experiments()]
    raise TrackingError(
        f"there is no experiment {config.experiment!r} at {without_password(uri)};"
        f" {nearest_names(config.experiment, names)}"
    )


def _client(uri: str) -> "MlflowClient":
    reach(uri)
    from mlflow import MlflowClient  # takes 1 to 2 s

    with refusals(uri):
        return MlflowClient(tracking_uri=uri)


# One run of any experiment, by a prefix of its id.

_LEAST = 6
"""Least characters of a prefix of an id."""
_ID = re.compile(r"[0-9A-Za-z]+")
_WHOLE = 32
"""Characters of a full id."""
_SHOWN = 4


@dataclass(frozen=True, slots=True)
class FoundRun:
    """A run and the name of its experiment."""

    run_id: str
    experiment: str


def find_run(config: TrackingConfig, root: Path, beginning: str, key: str = "") -> FoundRun:
    """Return the run whose id starts with `beginning`, in the store of `config`.

    With a `key`, a logged `config_key`, return the latest run of that key; `beginning` is then only
    used in messages.

    Raises:
        SpecError: if there is no such run, or more than one, or the beginning is too short.
        TrackingError: if the store cannot be read.

    """
    uri = store_uri(config, root)
    if not key and len(beginning) < _LEAST:
        raise SpecError(
            f"{beginning!r} is too short for a run's id; give its first {_LEAST} characters or more"
        )
    database = sqlite_path(uri)
    if database is not None and not has_content(database):
        raise unknown_run(beginning, uri)
    client = _client(uri)
    with refusals(uri):
        runs: list[Run] = []
        if key:
            condition = f"tags.config_key = '{key}'"
            runs = list(client.search_runs(list(_experiment_ids(client)), condition, max_results=1))
        elif _ID.fullmatch(beginning):
            runs = _runs_beginning(client, beginning)
        if len(runs) == 1:
            info = runs[0].info
            return FoundRun(info.run_id, client.get_experiment(info.experiment_id).name)
    if not runs:
        raise unknown_run(beginning, uri)
    ids = ", ".join(sorted(run.info.run_id for run in runs)[:_SHOWN])
    ellipsis = ", ..." if len(runs) > _SHOWN else ""
    raise SpecError(f"several runs begin with {beginning!r}; give more of one: {ids}{ellipsis}")


def unknown_run(beginning: str, uri: str) -> SpecError:
    """Return the error for an id without a run at `uri`."""
    return SpecError(
        f"there is no run {beginning!r} at {without_password(uri)}; its MLflow page shows a run's "
        "id, and tracking.uri= names another store"
    )


def _runs_beginning(client: "MlflowClient", beginning: str) -> "list[Run]":
    """Return runs whose ids start with `beginning`, at most one more than messages show."""
    if len(beginning) == _WHOLE:
        run = _stored_run(client, beginning)
        return [run] if run else []
    condition = f"attributes.run_id LIKE '{beginning}%'"
    page = client.search_runs(list(_experiment_ids(client)), condition, max_results=_SHOWN + 1)
    # A store may ignore case.
    return [run for run in page if run.info.run_id.startswith(beginning)]


def _experiment_ids(client: "MlflowClient") -> Iterator[str]:
    token: str | None = None
    while True:
        page: Any = client.search_experiments(page_token=token)
        yield from (experiment.experiment_id for experiment in page)
        token = page.token
        if not token:
            return
