"""A job of a sweep, decided before anything runs."""

from collections.abc import Mapping
from dataclasses import dataclass

from runner.config.schema import Config
from runner.job.identity import Choices

__all__ = ["Job", "JobEnd"]


@dataclass(frozen=True, eq=False, slots=True)
class Job:
    """A job of a sweep, composed once so that later edits of ``conf/`` have no effect."""

    index: int
    """Its position in the sweep, from 0."""
    overrides: tuple[str, ...]
    """The overrides that run this job by itself."""
    choices: Choices
    config: Config | None
    """None if it is invalid: the job then fails with `error`."""
    error: str | None
    key: str
    """The job's identity: a hash of everything that decides its result, 16 hex digits."""
    inputs: str | None = None
    """Its `identity.inputs_key` when the sweep began; the job fails if that has changed since."""


@dataclass(frozen=True, eq=False, slots=True)
class JobEnd:
    """The end of a job, in this command or an earlier one."""

    status: str
    """``finished``, ``infeasible``, ``not_applicable`` or ``failed``; ``lost`` if its process was
    killed."""
    metrics: Mapping[str, float]
    error: str | None = None
    known: bool = False
    """Whether an earlier command ran it."""
    run_id: str | None = None
    """The id of its run in MLflow, if known."""
    parent_run: str | None = None
    """For a known job, the MLflow run of the sweep that ran it; other sweeps may share it since."""
