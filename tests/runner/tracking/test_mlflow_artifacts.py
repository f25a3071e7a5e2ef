"""Which files of a run's folder go to the store."""

from pathlib import Path
from typing import TYPE_CHECKING, cast

import pytest

from runner.tracking.mlflow_artifacts import Target, keep_artifacts
from runner.tracking.unsent import UNSENT_FILE

if TYPE_CHECKING:
    from mlflow import MlflowClient

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:mlflow")


def test_what_only_a_launcher_needs_is_left_out(tmp_path: Path) -> None:
    folder, kept = tmp_path / "job", tmp_path / "kept"
    (folder / "config").mkdir(parents=True)
    (folder / "stages").mkdir()
    for name in ("result.json", "job.json", UNSENT_FILE, "config/job.json"):
        (folder / name).touch()
    # Of a folder on this machine the store itself is not asked.
    target = Target(cast("MlflowClient", None), "1", kept.as_uri())
    keep_artifacts(target, {}, folder, "stages")
    found = sorted(path.relative_to(kept).as_posix() for path in kept.rglob("*"))
    assert found == ["config", "config/job.json", "result.json"]
