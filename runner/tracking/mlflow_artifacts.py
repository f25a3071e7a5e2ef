"""The files of a run in MLflow: tables as it writes them itself, and a folder's content.

Where the store keeps files on this machine they are copied there at once: MLflow would ask the
store for each of them where it goes, and read back each table through pandas to add to it.
"""

import json
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import unquote, urlsplit

from fxpart.support.whole_file import write_whole
from runner.output.text_files import json_text
from runner.tracking.mlflow_values import legal_names
from runner.tracking.tracker import ALL_BUT_INPUTS, INPUTS_FOLDER, Columns
from runner.tracking.unsent import UNSENT_FILE

if TYPE_CHECKING:
    from mlflow import MlflowClient

__all__ = [
    "LOGGED_ARTIFACTS",
    "Target",
    "keep_artifacts",
    "keep_files",
    "logged_tables",
    "read_file",
]

LOGGED_ARTIFACTS = "mlflow.loggedArtifacts"
"""The tag in which MLflow looks for tables."""
_JOB_FILE = "job.json"
"""What a launcher's process is told of its job: folders of this machine, and no result."""


class Target(NamedTuple):
    """The run whose files are kept, and where its store keeps them."""

    client: "MlflowClient"
    run_id: str
    artifact_uri: str


def keep_artifacts(
    target: Target,
    tables: Mapping[str, Columns],
    folder: Path | None,
    left_out: str | None,
) -> None:
    """Keep `tables`, and what is in `folder` except for the folder `left_out` in it.

    With `ALL_BUT_INPUTS` left out, only the folder of inputs.

    Raises OSError or MLflow's own errors.
    """
    entries = _entries(folder, left_out) if folder is not None and folder.is_dir() else []
    local = local_folder(target.artifact_uri)
    if local is not None:
        local.mkdir(parents=True, exist_ok=True)
        _copy(entries, local)
        _write_tables(tables, local)
        return
    for entry in entries:
        if entry.is_dir():
            target.client.log_artifacts(target.run_id, str(entry), entry.name)
        else:
            target.client.log_artifact(target.run_id, str(entry))
    if tables:
        with tempfile.TemporaryDirectory() as beside:
            _write_tables(tables, Path(beside))
            target.client.log_artifacts(target.run_id, beside)


def keep_files(client: "MlflowClient", run_id: str, files: Sequence[Path]) -> None:
    """Keep single files under their own names. Raises OSError or MLflow's own errors."""
    for path in files:
        client.log_artifact(run_id, str(path))


def read_file(client: "MlflowClient", run_id: str, path: str) -> bytes | None:
    """Return what a run's file says, None when the run has no file at `path`.

    Raises OSError or MLflow's own errors.
    """
    beside = client.list_artifacts(run_id, path.rpartition("/")[0])
    if path not in [item.path for item in beside if not item.is_dir]:
        return None
    # One file in a line of our own needs no bar.
    os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
    with tempfile.TemporaryDirectory() as folder:
        return Path(client.download_artifacts(run_id, path, folder)).read_bytes()


def local_folder(artifact_uri: str) -> Path | None:
    """Return the folder on this machine that `artifact_uri` is, None when it is elsewhere."""
    parts = urlsplit(artifact_uri)
    if parts.scheme == "file" and parts.netloc in ("", "localhost"):
        return Path(unquote(parts.path))
    return Path(artifact_uri) if not parts.scheme and Path(artifact_uri).is_absolute() else None


def logged_tables(tables: Mapping[str, Columns]) -> str:
    """Return the tag by which MLflow knows which of a run's files are tables."""
    paths = [{"path": f"{name}.json", "type": "table"} for name in legal_names(tables).values()]
    return json.dumps(paths)


def _entries(folder: Path, left_out: str | None) -> list[Path]:
    if left_out == ALL_BUT_INPUTS:
        inputs = folder / INPUTS_FOLDER
        return [inputs] if inputs.is_dir() else []
    skipped = (left_out, UNSENT_FILE, _JOB_FILE)
    return sorted(path for path in folder.iterdir() if path.name not in skipped)


def _copy(entries: Sequence[Path], target: Path) -> None:
    """Copy files and folders; one that is there already is written again."""
    for entry in entries:
        if entry.is_dir():
            shutil.copytree(
                entry, target / entry.name, copy_function=shutil.copyfile, dirs_exist_ok=True
            )
        else:
            shutil.copyfile(entry, target / entry.name)


def _write_tables(tables: Mapping[str, Columns], target: Path) -> None:
    names = legal_names(tables)
    for name, columns in tables.items():
        rows = list(zip(*columns.values(), strict=True))
        text = json_text({"columns": list(columns), "data": rows})
        path = target / f"{names[name]}.json"
        write_whole(path, text, str(path), "make room there")
