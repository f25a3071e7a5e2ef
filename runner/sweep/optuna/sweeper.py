"""The Optuna sweep: run the proposed jobs and report their results to the study."""

import importlib.util
import shlex
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, cast

from fxpart.errors import SpecError
from fxpart.support.digest import stable_digest
from runner.errors import TrackingError
from runner.job.identity import deciding, for_jobs, without_elsewhere
from runner.output.terminal import counted, show
from runner.sweep.composition import SweepLoad, compose_one, make_job
from runner.sweep.optuna.space import Space, keys_of, read_space
from runner.sweep.optuna.study import Goal, Search, Trial, read_goals, refuse_unknown_metrics
from runner.sweep.parent_run import SweepSpec, command_line
from runner.sweep.session import Session, opened_session
from runner.sweep.sum_up import sum_up
from runner.sweep.swept_job import Job
from runner.sweep.where import parse_where

if TYPE_CHECKING:
    from hydra.types import HydraContext
    from omegaconf import DictConfig

__all__ = ["run_optuna"]

_OURS = ("hydra/sweeper=", "hydra.sweeper.", "hydra/launcher=", "hydra.launcher.")
"""Prefixes of Hydra's overrides that are part of a sweep's command."""
_PATIENCE = 50
"""Batches in a row without a new job after which the search ends."""


@dataclass(frozen=True, slots=True)
class _Settings:
    """The settings of ``hydra.sweeper``, without the swept keys."""

    goals: tuple[Goal, ...]
    sampler: str
    n_trials: int
    n_jobs: int
    seed: int | None


def run_optuna(
    context: "HydraContext",
    task_function: Callable[[Any], Any],
    config: "DictConfig",
    arguments: Sequence[str],
) -> None:
    """Search the space of the command line, `arguments`, and the configuration.

    Raises:
        FxpartError: if the space cannot be searched, or no job has the metric.

    """
    if importlib.util.find_spec("optuna") is None:
        raise SpecError("hydra/sweeper=optuna needs optuna; pip install 'fxpart[optuna]'")
    sweeper = _plain(config.hydra.sweeper)
    settings = _settings(sweeper)
    refuse_unknown_metrics(settings.goals)
    zips = _plain(config.zip) if config.zip else None
    whole = read_space(arguments, sweeper["params"], zips, context.config_loader)
    space = replace(whole, fixed=for_jobs(whole.fixed))
    search = Search(space, settings.goals, settings.sampler, settings.seed)
    jobs = _Jobs(context, config)
    # Read each file now, so that edits of conf/ do not affect a search that has begun.
    samples = [jobs.of(overrides).key for overrides in space.samples()]
    spec = _spec(config, arguments, space, settings, samples)
    with opened_session(config, task_function, spec) as session:
        has_more = _run(search, settings, session, jobs)
        best = search.best()
        if best:
            _record(session, settings.goals, best, jobs)
    sum_up(session)
    show(*_lines(settings, best, session, has_more=has_more))
    search.refuse_unknown()


def _plain(node: object) -> Any:  # noqa: ANN401
    from omegaconf import OmegaConf

    return OmegaConf.to_container(cast("DictConfig", node), resolve=True)


def _settings(sweeper: dict[str, Any]) -> _Settings:
    """Return the settings in the sweeper's section. Raises `SpecError` for invalid ones."""
    for name in ("n_trials", "n_jobs"):
        value = sweeper[name]
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise SpecError(f"hydra.sweeper.{name}={value} must be a whole number from 1")
    seed = sweeper["seed"]
    if seed is not None and (not isinstance(seed, int) or isinstance(seed, bool) or seed < 0):
        raise SpecError(f"hydra.sweeper.seed={seed} must be a whole number from 0")
    return _Settings(
        goals=read_goals(sweeper["metric"], sweeper["direction"]),
        sampler=str(sweeper["sampler"]),
        n_trials=sweeper["n_trials"],
        n_jobs=sweeper["n_jobs"],
        seed=seed,
    )


def _spec(
    config: "DictConfig",
    arguments: Sequence[str],
    space: Space,
    settings: _Settings,
    samples: Sequence[str],
) -> SweepSpec:
    """Return the identity of the sweep, which a larger number of trials does not change.

    `samples` are keys of some of its jobs, which change with the files and the code.
    """
    keys = [key for dimension in space.dimensions for key in keys_of(dimension)]
    experiment = str(config.hydra.runtime.choices.get("experiment") or "")
    identity = {
        "fixed": deciding(space.fixed),
        "samples": samples,
        "dimensions": [asdict(dimension) for dimension in space.dimensions],
        "goals": [asdict(goal) for goal in settings.goals],
        "sampler": settings.sampler,
        "seed": settings.seed,
        "where": config.where,
        "experiment": experiment,
    }
    size = space.size()
    of_hydra = [str(override) for override in config.hydra.overrides.hydra]
    return SweepSpec(
        title=f"{experiment or 'sweep'} optuna: {' · '.join(keys)}",
        key=stable_digest(identity)[:16],
        swept=tuple(keys),
        overrides=without_elsewhere(arguments),
        total=min(settings.n_trials, size) if size is not None else settings.n_trials,
        command=command_line([*(text for text in of_hydra if text.startswith(_OURS)), *arguments]),
        question=config.question,
        experiment=experiment,
    )


class _Jobs:
    """Composes the job of each proposal, once."""

    def __init__(self, context: "HydraContext", config: "DictConfig") -> None:
        self._load = SweepLoad(context.config_loader, config)
        self._where = parse_where(config.where) if config.where else None
        self._made: dict[tuple[str, ...], Job] = {}

    def of(self, overrides: tuple[str, ...]) -> Job:
        """Return the job, without its index."""
        if overrides not in self._made:
            self._made[overrides] = make_job(0, compose_one(self._load, overrides))
        return self._made[overrides]

    def wants(self, overrides: tuple[str, ...]) -> bool:
        """Return whether the job satisfies ``where=``; an invalid job does, and fails later."""
        if self._where is None:
            return True
        job = self.of(overrides)
        return job.config is None or self._where.holds(job.config, job.choices)


def _run(search: Search, settings: _Settings, session: Session, jobs: _Jobs) -> bool:
    """Run distinct jobs until there are enough; return whether there may be more of them.

    Proposals with the same key are one job.
    """
    in_vain = 0
    while (n_done := len(session.ends)) < settings.n_trials:
        batch_size = min(settings.n_jobs, settings.n_trials - n_done)
        proposals = search.ask(batch_size, jobs.wants) if in_vain < _PATIENCE else []
        if not proposals:
            return False
        proposed = [
            replace(jobs.of(proposal.overrides), index=proposal.job) for proposal in proposals
        ]
        # Report in the order of proposals, not of ends, to keep further proposals reproducible.
        for proposal, end in zip(proposals, session.run(proposed), strict=True):
            search.tell(proposal, end)
        in_vain = in_vain + 1 if len(session.ends) == n_done else 0
    return True


def _record(session: Session, goals: Sequence[Goal], best: Sequence[Trial], jobs: _Jobs) -> None:
    """Log the best trials to the sweep's parent run: values, command and run ids."""
    metrics = {}
    for position, goal in enumerate(goals):
        best_of = min if goal.direction == "minimize" else max
        metrics[f"best_{goal.metric}"] = best_of(trial.values[position] for trial in best)
    ends = [session.ends[jobs.of(trial.overrides).key] for trial in best]
    tags = {
        "best_run": " ".join(end.run_id for end in ends if end.run_id),
        "best_command": _command(best[0]) if len(best) == 1 else "",
    }
    # Empty tags replace those of an earlier command with another best trial.
    with suppress(TrackingError):  # reported at the end of the sweep
        session.tracker.log_sweep(session.parent.ids.parent_run, metrics=metrics, tags=tags)


def _lines(
    settings: _Settings, best: Sequence[Trial], session: Session, *, has_more: bool
) -> list[str]:
    """Return lines on the best trials: their values, and the commands that repeat them."""
    tried = counted(len(session.ends), "job")
    lines = []
    if not has_more:
        lines.append(f"optuna:    nothing new to propose after {tried}")
    if len(settings.goals) > 1 and best:
        names = " and ".join(goal.metric for goal in settings.goals)
        lines.append(f"pareto:    {len(best)} of {tried} that no other beats in {names}")
    for trial in best:
        values = ", ".join(
            f"{goal.metric} {value:.7g}"
            for goal, value in zip(settings.goals, trial.values, strict=True)
        )
        lines.append(f"best:      {values} in job {trial.job}")
        lines.append(f"           {_command(trial)}")
    return lines


def _command(trial: Trial) -> str:
    """Return the command that runs only the trial's job."""
    return shlex.join(["python", "-m", "runner", *deciding(trial.overrides)])
