"""The runs of an MLflow store: which are settled, which were cut off, and marking them so."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from runner.tracking.mlflow_database import Database
from runner.tracking.mlflow_search import (
    DatabaseSearch,
    Search,
    ServerSearch,
    logged_run,
    run_of_id,
)
from runner.tracking.mlflow_values import tag_texts
from runner.tracking.open_run import OUTCOME
from runner.tracking.tracker import LoggedRun

if TYPE_CHECKING:
    from mlflow import MlflowClient

__all__ = ["PARENT", "SWEEPS", "MlflowRuns"]

PARENT, SWEEPS = "mlflow.parentRunId", "sweeps"
_SETTLED = {"finished": "FINISHED", "infeasible": "FAILED"}
"""Outcomes that are results, and the status of a run with each."""
_ONGOING = ("RUNNING", "SCHEDULED")
_SWEEPS_CHARS = 7900
"""Of the tag that lists a run's sweeps: a store keeps 8,000, some 460 sweeps; more are left out."""


class MlflowRuns:
    """The runs of one experiment. All methods raise MLflow's own errors, and sqlalchemy's."""

    def __init__(
        self, client: "MlflowClient", experiment_id: str, database: Database | None
    ) -> None:
        """Take the `database` where the store is one, None for a server."""
        self._client, self._database = client, database
        self.search: Search = (
            DatabaseSearch(database, experiment_id)
            if database
            else ServerSearch(client, experiment_id)
        )

    def one(self, run_id: str) -> LoggedRun | None:
        """Return the run of that id, None when there is none."""
        found = run_of_id(self._client, run_id)
        return logged_run(found) if found else None

    def settled(
        self,
        tag: str,
        values: Collection[str],
        stands: Callable[[LoggedRun], bool] = lambda _run: True,
    ) -> dict[str, LoggedRun]:
        """Return the newest run with a result that `stands`, by its value of `tag`.

        One whose process died between its last value and its end is ended here.
        """
        found = self.search.with_values(tag, values, OUTCOME, tuple(_SETTLED))
        results = [run for run in found if run.tags.get(OUTCOME) in _SETTLED]
        newest = {run.tags[tag]: run for run in results if stands(run)}
        for run in newest.values():
            if run.status in _ONGOING:
                self._client.set_terminated(run.run_id, _SETTLED[run.tags[OUTCOME]])
        return newest

    def unfinished(self, tag: str, values: Collection[str]) -> list[LoggedRun]:
        """Return the runs with one of these values that came to no result, the oldest first."""
        found = self.search.with_values(tag, values, OUTCOME, ())
        return [run for run in found if run.tags.get(OUTCOME) not in _SETTLED]

    def mark_cut_off(self, run_id: str, reason: str) -> None:
        """Mark a run whose process died; done again after a kill half-way, it completes the mark.

        The kind, by which such runs are found, changes last.
        """
        self._leave_sweep(run_id, "cut_off_from", {"error": reason})
        self._client.set_terminated(run_id, "KILLED")
        self._tag({run_id: {OUTCOME: "cut_off", "kind": "cut_off"}})

    def supersede(self, run_id: str) -> None:
        """Take a failed run out of its sweep; its status and its error stay."""
        self._leave_sweep(run_id, "superseded_in", {})
        self._tag({run_id: {"kind": "superseded"}})

    def _leave_sweep(self, run_id: str, was_in: str, tags: Mapping[str, str]) -> None:
        """Keep the parent's id under another name, so that no table of its runs counts it."""
        parent = self._client.get_run(run_id).data.tags.get(PARENT)
        self._tag({run_id: {**tags, **({was_in: parent} if parent else {})}})
        if parent:
            self._client.delete_tag(run_id, PARENT)

    def join_sweep(self, run_ids: Sequence[str], sweep_id: str) -> None:
        """Add a sweep to the tag of each run that lacks it."""
        if self._database:
            self._database.add_word(run_ids, SWEEPS, sweep_id, _SWEEPS_CHARS)
            return
        listed = {run.run_id: run.sweeps for run in self.search.by_id(run_ids)}
        self._tag(
            {
                run_id: {SWEEPS: f" {' '.join([*sweeps, sweep_id])} "}
                for run_id, sweeps in listed.items()
                if sweep_id not in sweeps and len(" ".join(sweeps)) + 2 < _SWEEPS_CHARS
            }
        )

    def _tag(self, tags: Mapping[str, Mapping[str, str]]) -> None:
        """Set tags by run id: at once in a database, else with one request for each run."""
        texts = {run_id: tag_texts(some) for run_id, some in tags.items()}
        if self._database:
            self._database.set_tags(texts)
            return
        from mlflow.entities import RunTag

        for run_id, some in texts.items():
            self._client.log_batch(run_id, tags=[RunTag(k, v) for k, v in some.items()])
