"""The folder in which the command is run, and its store."""

import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING
from unittest.mock import patch

import pytest

from benchmarks.parsed_files import keep_parsed_files
from runner.config.schema import TrackingConfig
from runner.tracking.open_tracker import open_tracker
from tests.runner.command import MODEL

if TYPE_CHECKING:
    from mlflow import MlflowClient

    from runner.tracking.mlflow_tracker import MlflowTracker


@pytest.fixture(scope="session")
def graph_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Captured graphs, shared by all tests of all workers: that saves seconds."""
    base = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return tmp_path_factory.mktemp("cache")
    return base.parent / "cache"  # the workers' folders are siblings


@pytest.fixture(scope="session", autouse=True)
def _parsed_files() -> None:
    """Parse the shipped files of the configuration once: a third of the time to compose one."""
    keep_parsed_files()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A user's folder with a model in it; the next test has modules with the same names."""
    monkeypatch.setenv("COLUMNS", "120")
    (tmp_path / "tiny.py").write_text(MODEL)
    before = set(sys.modules)
    yield tmp_path
    for name in sys.modules.keys() - before:
        if (getattr(sys.modules[name], "__file__", None) or "").startswith(f"{tmp_path}{os.sep}"):
            del sys.modules[name]


@pytest.fixture(scope="session")
def empty_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store to copy: creating one takes seconds."""
    root = tmp_path_factory.mktemp("store")
    with patch.dict(os.environ):
        os.environ.pop("MLFLOW_TRACKING_URI", None)
        open_tracker(TrackingConfig(), root)
    return root / "outputs" / "mlflow.db"


@pytest.fixture
def store(folder: Path, empty_store: Path) -> Path:
    """An empty store in the user's folder."""
    (folder / "outputs").mkdir()
    return Path(shutil.copy(empty_store, folder / "outputs"))


@pytest.fixture(autouse=True)
def _own_store_and_cache(graph_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ignore any store that the environment names, and the user's captured graphs."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(graph_cache))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)


@pytest.fixture
def tracker(empty_store: Path, tmp_path: Path) -> "MlflowTracker":
    """A tracker whose store is empty and used by this test alone."""
    from runner.tracking.mlflow_tracker import MlflowTracker

    (tmp_path / "outputs").mkdir()
    shutil.copy(empty_store, tmp_path / "outputs")
    opened = open_tracker(TrackingConfig(), tmp_path)
    assert isinstance(opened, MlflowTracker)
    return opened


@pytest.fixture
def client(tracker: "MlflowTracker", tmp_path: Path) -> "MlflowClient":
    """A reader of what the tracker wrote."""
    from mlflow import MlflowClient

    return MlflowClient(f"sqlite:///{tmp_path}/outputs/mlflow.db")
