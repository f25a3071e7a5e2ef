"""The job that a composed configuration makes, with its identity."""

from fxpart.errors import SpecError
from fxpart.stable_json import stable_digest
from runner.experiment import model_spec
from runner.identity import config_key, inputs_key, without_elsewhere
from runner.sweeps.composition import Composed
from runner.sweeps.job_values import deciding
from runner.sweeps.jobs import Job

__all__ = ["make_job"]


def make_job(index: int, composed: Composed) -> Job:
    """Return the job; one whose configuration makes no sense is known by what was asked."""
    config, error = composed.config, composed.error
    key, inputs = "", None
    if config is not None:
        try:
            inputs = inputs_key(config, model_spec(config).key())
            key = config_key(config, inputs)
        except SpecError as wrong:
            config, error = None, " ".join(str(wrong).split())
    if not key:
        key = stable_digest({"overrides": deciding(composed.overrides), "error": error})[:16]
    # A job's overrides go into files and messages, and its tracking may hold a password.
    overrides = without_elsewhere(composed.overrides)
    return Job(index, overrides, composed.choices, config, error, key, inputs)
