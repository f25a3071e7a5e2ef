"""Write a run to MLflow: create, fill and close it, in as few requests as possible.

Writing a run again, identified by its record, completes it and does not duplicate it. A run is
created with its parameters when it begins. When it ends, its files follow, then its values, with
the tag ``outcome`` last, and then its status: a run with the tag is complete.
"""

import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fxpart.support.text_files import json_text
from runner.tracking.mlflow_opening import Store
from runner.tracking.mlflow_values import batches, finite_metrics, legal_names, tag_texts
from runner.tracking.tracker import ALL_BUT_INPUTS, INPUTS_FOLDER, Columns, UnsentRun
from runner.tracking.unsent import OUTCOME, RECORD, UNSENT_FILE, now_ms

if TYPE_CHECKING:
    from mlflow import MlflowClient

__all__ = [
    "fill_and_close",
    "find_or_make",
    "keep_artifacts",
    "make_run",
    "read_file",
    "write_some",
]

_LOGGED_ARTIFACTS = "mlflow.loggedArtifacts"
"""The tag that lists a run's tables for MLflow."""
_JOB_FILE = "job.json"
"""The file that passes a job to a launcher's process: it has folders of this machine, no result."""
_Point = tuple[str, float, int, int]
"""A metric's name, value, time in milliseconds since 1970, and step."""


def make_run(
    store: Store,
    name: str,
    tags: Mapping[str, str],
    start_ms: int,
    params: Mapping[str, str] | None = None,
) -> str:
    """Create a run, RUNNING since `start_ms`, and return its id."""
    with store.writing():
        run = store.client.create_run(
            store.experiment_id, start_time=start_ms, run_name=name, tags=tag_texts(tags)
        )
        run_id: str = run.info.run_id
        _send(store.client, run_id, [], params or {}, {})
    return run_id


def find_or_make(store: Store, run: UnsentRun) -> str:
    """Return the id of the run with this record, creating it if the store has none.

    The store may have created the run, and failed before returning its id.
    """
    runs = store.client.search_runs(
        [store.experiment_id], f"tags.{RECORD} = '{run.record_id}'", max_results=1
    )
    if runs:
        return str(runs[0].info.run_id)
    tags = {key: value for key, value in run.tags.items() if key != OUTCOME}
    return make_run(store, run.name, tags, run.start_ms)


def fill_and_close(store: Store, run_id: str, run: UnsentRun, folder: Path) -> None:
    """Log all of `run`, whose artifacts are relative to `folder`, and close it."""
    artifacts = folder / run.artifacts if run.artifacts is not None else None
    keep_artifacts(store.client, run_id, run.tables, artifacts, run.left_out)
    points = [(name, value, run.end_ms, 0) for name, value in run.metrics.items()]
    names = legal_names(run.series)
    for name, series in run.series.items():
        points += [(names[name], value, run.end_ms, step) for step, value in series]
    tags = dict(run.tags)
    if run.tables:
        tags[_LOGGED_ARTIFACTS] = _table_list(run.tables)
    tags[OUTCOME] = tags.pop(OUTCOME)
    with store.writing():
        _send(store.client, run_id, points, run.params, tags)
        store.client.set_terminated(run_id, run.status, run.end_ms)


def write_some(
    client: "MlflowClient",
    run_id: str,
    metrics: Mapping[str, float],
    tags: Mapping[str, str],
    files: Sequence[Path],
) -> None:
    """Add finite metrics, tags and files to a run, the files under the same names."""
    time_ms = now_ms()
    points = [(name, value, time_ms, 0) for name, value in finite_metrics(metrics).items()]
    _send(client, run_id, points, {}, tags)
    for path in files:
        client.log_artifact(run_id, str(path))


def _send(
    client: "MlflowClient",
    run_id: str,
    points: Sequence[_Point],
    params: Mapping[str, str],
    tags: Mapping[str, str],
) -> None:
    """Send all values in as few requests as possible: one per value takes 50 times as long."""
    from mlflow.entities import Metric, Param, RunTag

    numbers = [Metric(*point) for point in points]
    texts = [Param(key, value) for key, value in params.items()]
    labels = [RunTag(key, value) for key, value in tag_texts(tags).items()]
    for batch in batches(numbers, texts, labels):
        client.log_batch(run_id, batch.metrics, batch.params, batch.tags)


# The files of a run.


def keep_artifacts(
    client: "MlflowClient",
    run_id: str,
    tables: Mapping[str, Columns],
    folder: Path | None,
    left_out: str | None,
) -> None:
    """Store `tables`, and the content of `folder` except the folder `left_out` in it.

    With `ALL_BUT_INPUTS`, only the folder of inputs is stored. Raises OSError or MLflow's own
    errors.
    """
    if folder is not None and folder.is_dir():
        entries = _entries(folder, left_out)
        if len(entries) == len(list(folder.iterdir())):
            client.log_artifacts(run_id, str(folder))  # one call is faster
        else:
            for entry in entries:
                client.log_artifact(run_id, str(entry))
    names = legal_names(tables)
    for name, columns in tables.items():
        # The format of `log_table`, which would import pandas and turn integers into floats.
        rows = list(zip(*columns.values(), strict=True))
        text = json_text({"columns": list(columns), "data": rows})
        client.log_text(run_id, text, f"{names[name]}.json")


def _table_list(tables: Mapping[str, Columns]) -> str:
    paths = [{"path": f"{name}.json", "type": "table"} for name in legal_names(tables).values()]
    return json.dumps(paths)


def _entries(folder: Path, left_out: str | None) -> list[Path]:
    if left_out == ALL_BUT_INPUTS:
        inputs = folder / INPUTS_FOLDER
        return [inputs] if inputs.is_dir() else []
    skipped = (left_out, UNSENT_FILE, _JOB_FILE)
    return sorted(path for path in folder.iterdir() if path.name not in skipped)


def read_file(client: "MlflowClient", run_id: str, path: str) -> bytes | None:
    """Return the content of a run's file at `path`; None if there is none.

    Raises OSError or MLflow's own errors.
    """
    siblings = client.list_artifacts(run_id, path.rpartition("/")[0])
    if path not in [item.path for item in siblings if not item.is_dir]:
        return None
    # No progress bar for a single file.
    os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
    with tempfile.TemporaryDirectory() as folder:
        return Path(client.download_artifacts(run_id, path, folder)).read_bytes()
