"""A job of a sweep, decided before anything runs."""

from collections.abc import Mapping
from dataclasses import dataclass

from runner.config.sections import Config
from runner.job.identity import Choices

__all__ = ["Job", "JobEnd"]


@dataclass(frozen=True, eq=False, slots=True)
class Job:
    """What a job is: composed once, so that editing ``conf/`` meanwhile changes nothing."""

    index: int
    """Its place in the sweep, from 0."""
    overrides: tuple[str, ...]
    """As they would be typed to run this job alone."""
    choices: Choices
    config: Config | None
    """None where the values make no sense: `error` says why, and the job fails with it."""
    error: str | None
    key: str
    """The job's identity: a hash of what decides its result, 16 hex digits."""
    inputs: str | None = None
    """Its `identity.inputs_key` when the sweep began; it fails if its inputs have changed since."""


@dataclass(frozen=True, eq=False, slots=True)
class JobEnd:
    """How a job ended, in this command or an earlier one."""

    status: str
    """``finished``, ``infeasible``, ``not_applicable`` or ``failed``; ``lost`` where its process
    was killed."""
    metrics: Mapping[str, float]
    error: str | None = None
    known: bool = False
    """Whether an earlier command ran it."""
    run_id: str | None = None
    """Of its run in MLflow, where that is known."""
    parent_run: str | None = None
    """The sweep's run in MLflow that a known one was made in; others have joined it since."""
