"""Readers of a tracker's log, and a store with short timeouts."""

from collections.abc import Iterator

import pytest
from mlflow import MlflowClient
from mlflow.entities import Experiment
from sqlalchemy import Engine, event

__all__ = ["PARAMS", "experiment_of", "impatient"]

PARAMS = {"model": "gpt2", "mode": "kl_based", "devices": "4x16gb", "transfer_rate": "pcie4"}


def experiment_of(client: MlflowClient) -> Experiment:
    """Return the experiment that runs are kept in."""
    experiment = client.get_experiment_by_name("fxpart")
    assert experiment is not None
    return experiment


@pytest.fixture
def impatient() -> Iterator[None]:
    """Let MLflow wait 50 ms for a file that another process has locked, not 20 s."""

    def shorten(*arguments: object) -> tuple[str, object]:
        _, _, statement, parameters, *_ = arguments
        return str(statement).replace("busy_timeout = 20000", "busy_timeout = 50"), parameters

    event.listen(Engine, "before_cursor_execute", shorten, retval=True)
    yield
    event.remove(Engine, "before_cursor_execute", shorten)
