"""A run that is written in SQL is the run that MLflow's own client would write."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from mlflow import MlflowClient

from runner.mlflow_database import open_database
from runner.mlflow_runs import MlflowRuns
from runner.mlflow_write import Store, fill_and_close, find_or_make, make_run
from runner.tracking import TrackingConfig, open_tracker
from runner.unsent import UnsentRun
from tests.runner.test_mlflow_store import opened_uri

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:mlflow")
