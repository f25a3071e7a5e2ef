"""A tracker on a store of its own, and a reader of what it wrote."""

from mlflow import MlflowClient
from mlflow.entities import Experiment

__all__ = ["PARAMS", "experiment_of"]

PARAMS = {"model": "gpt2", "mode": "kl_based", "devices": "4x16gb", "transfer_rate": "pcie4"}


def experiment_of(client: MlflowClient) -> Experiment:
    """Return the experiment that runs are kept in."""
    experiment = client.get_experiment_by_name("fxpart")
    assert experiment is not None
    return experiment
