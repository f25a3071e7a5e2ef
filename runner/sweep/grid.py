"""The grid sweep: all combinations of values, except those that ``where=`` excludes."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from fxpart.errors import FxpartError, SpecError
from fxpart.support.digest import stable_digest
from runner.experiment.check import check
from runner.job.identity import for_jobs, override_values, without_elsewhere
from runner.job.record import sweep_title
from runner.output.terminal import counted, show
from runner.sweep.axes import Axis, read_axes
from runner.sweep.composition import Composed, SweepLoad, compose_grid, make_job
from runner.sweep.job_values import open_names
from runner.sweep.parent_run import SweepSpec, command_line
from runner.sweep.session import opened_session
from runner.sweep.sum_up import sum_up
from runner.sweep.swept_job import Job
from runner.sweep.where import parse_where

if TYPE_CHECKING:
    from hydra.types import HydraContext
    from omegaconf import DictConfig

__all__ = ["run_grid"]

_MOST_SAME = 3
"""Most lines on identical jobs; one more line counts the rest."""


def run_grid(
    context: "HydraContext",
    task_function: Callable[[Any], Any],
    config: "DictConfig",
    arguments: Sequence[str],
) -> None:
    """Run the sweep of the command line, `arguments`, and the configuration.

    Raises:
        FxpartError: if the jobs cannot be composed, or all fail for the same reason.

    """
    axes, jobs = _jobs(context, config, arguments)
    spec = SweepSpec(
        title=_title(axes, config),
        key=stable_digest({"jobs": [job.key for job in jobs]})[:16],
        swept=_swept(axes),
        overrides=without_elsewhere(arguments),
        total=len({job.key for job in jobs}),
        command=command_line(arguments),
        question=config.question,
        experiment=str(config.hydra.runtime.choices.get("experiment") or ""),
    )
    _refuse_shared_mistake(jobs)
    _say_same(jobs)
    with opened_session(config, task_function, spec) as session:
        session.run(jobs)
    sum_up(session)


def _jobs(
    context: "HydraContext", config: "DictConfig", arguments: Sequence[str]
) -> tuple[tuple[Axis, ...], list[Job]]:
    """Return the axes and the jobs."""
    from omegaconf import OmegaConf

    params: Any = OmegaConf.to_container(config.hydra.sweeper.get("params") or OmegaConf.create())
    zips: Any = OmegaConf.to_container(config.zip) if config.zip else None
    fixed, axes = read_axes(arguments, params, zips, context.config_loader)
    for key in ("experiment", "rerun"):
        if key in _swept(axes):
            raise SpecError(f"{key}= takes one value; run one command for each")
    composed = compose_grid(SweepLoad(context.config_loader, config), for_jobs(fixed), axes)
    return axes, _chosen(composed, config.where)


def _refuse_shared_mistake(jobs: Sequence[Job]) -> None:
    """Raise `SpecError` if all jobs fail for the same reason, before anything is stored."""
    errors = set()
    for job in jobs:
        error = job.error
        if job.config is not None:
            try:
                check(job.config)
            except FxpartError as wrong:
                error = str(wrong)
        if error is None:
            return
        errors.add(error)
    if len(errors) == 1:
        raise SpecError(*errors)


def _swept(axes: Sequence[Axis]) -> tuple[str, ...]:
    return tuple(key for axis in axes for key in axis.keys)


def _title(axes: Sequence[Axis], config: "DictConfig") -> str:
    values: dict[str, dict[str, None]] = {}
    for row in (row for axis in axes for row in axis.values):
        for key, text in override_values(without_elsewhere(row)).items():
            values.setdefault(key, {})[text] = None
    experiment = config.hydra.runtime.choices.get("experiment")
    return sweep_title(
        str(experiment or "sweep"), {key: list(texts) for key, texts in values.items()}
    )


def _chosen(composed: Sequence[Composed], where: str | None) -> list[Job]:
    """Return the jobs that satisfy `where`, numbered by their position in the whole grid."""
    numbered_jobs = list(enumerate(composed))
    if where:
        names = open_names([job.config for job in composed if job.config is not None])
        condition = parse_where(where, names)
        numbered_jobs = [
            (index, job)
            for index, job in numbered_jobs
            if job.config is None or condition.holds(job.config, job.choices)
        ]
    if not numbered_jobs:
        raise SpecError(
            f"where={where!r} leaves none of {counted(len(composed), 'job')}; change it, or leave"
            " it out"
        )
    return [make_job(index, job) for index, job in numbered_jobs]


def _say_same(jobs: Sequence[Job]) -> None:
    """Print which jobs have the key of an earlier one: only their names differ."""
    first: dict[str, Job] = {}
    pairs: dict[tuple[str, str], None] = {}
    for job in jobs:
        known = first.setdefault(job.key, job)
        if known is not job:
            job_text = _but(job, known)
            known_text = _but(known, job)
            pairs[job_text, known_text] = None
    for job_text, known_text in list(pairs)[:_MOST_SAME]:
        show(f"same:      {job_text} is the same as {known_text}, run once")
    if len(pairs) > _MOST_SAME:
        show(f"same:      and {len(pairs) - _MOST_SAME} more pairs")


def _but(job: Job, other: Job) -> str:
    """Return the overrides of `job` that `other` lacks."""
    return " ".join(override for override in job.overrides if override not in other.overrides)
