"""A job and its identity."""

from dataclasses import replace

from fxpart.errors import SpecError
from runner.experiment.model_spec import model_spec
from runner.job.identity import Choices, config_key, inputs_key
from runner.sweep.composition import Composed, make_job
from runner.sweep.parent_run import command_line
from tests.runner.composed import read

CHOICES = Choices("gpt2", "single", "2x16gb", "pcie4")
PLACE = ("tracking.uri=postgresql://me:secret@host/runs", "+hydra.x=1", "tracking=mlflow")


def senseless(*overrides: str) -> Composed:
    return Composed(overrides, None, CHOICES, "modes=a does not exist")


def test_a_job_does_not_store_where_it_is_logged() -> None:
    composed = Composed(("mode=single", *PLACE), read("mode=single"), CHOICES, None)
    job = make_job(3, composed)
    assert job.config is not None
    assert (job.index, job.overrides, job.error) == (3, ("mode=single",), None)
    assert job.inputs == inputs_key(job.config, model_spec(job.config).key())
    assert job.key == config_key(job.config, job.inputs)


def test_a_meaningless_job_is_identified_by_the_deciding_settings() -> None:
    job = make_job(0, senseless("modes=a"))
    assert (job.config, job.error) == (None, "modes=a does not exist")
    beside = make_job(0, senseless("modes=a", "verbose=true", "figures=all", *PLACE))
    assert beside.key == job.key
    assert make_job(0, senseless("modes=a", "microbatches=2")).key != job.key


def test_an_unknown_model_makes_a_meaningless_job() -> None:
    config = read("model=gpt2")
    config = replace(config, model=replace(config.model, factory="nowhere_at_all:f"))
    try:
        model_spec(config).key()
    except SpecError as error:
        message = str(error)
    job = make_job(0, Composed((), config, CHOICES, None))
    assert (job.config, job.error) == (None, message)


def test_a_command_is_shown_without_the_place_of_runs() -> None:
    overrides = ["hydra/sweeper=optuna", "mode=a,b", "++tracking.uri=secret", "tracking=none"]
    assert command_line(overrides) == "python -m runner -m hydra/sweeper=optuna mode=a,b"
