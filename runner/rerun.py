"""A logged run, run again as it was: ``rerun=<run id>``."""

from dataclasses import replace
from typing import TYPE_CHECKING

from fxpart.errors import SpecError
from runner.config_tags import config_from_tags
from runner.files_read import changed_file, files_of
from runner.identity import Choices, override_values
from runner.job import JobIdentity, Outcome, run_job
from runner.job_identity import identified
from runner.mlflow_values import finite_metrics
from runner.rerun_inputs import restored
from runner.terminal import show
from runner.tracking import LoggedRun, TrackingConfig, open_tracker

if TYPE_CHECKING:
    from runner.sections import Config

__all__ = ["rerun"]

_BESIDE = ("rerun", "tracking", "verbose", "figures")
"""What may be said beside it: nothing that decides a result."""
_CHANGED = (
    "; but what decides its result is not what it was: a source of the model, fxpart, torch, or the"
    " machine"
)
_COMPARED = ("latency_ms", "peak_memory_gib", "partitions", "transfer_gib", "feasible")


def rerun(config: "Config", identity: JobIdentity) -> Outcome:
    """Run again what ``rerun=`` names, from what it logged, and say whether it is the same.

    It is logged beside it, in its experiment, unless another was asked for.

    Raises:
        SpecError: for other overrides, a run that does not exist or does not hold its
            configuration, or that read a file which is gone or changed and which it has not kept.
        TrackingError: for a store that cannot be read.

    """
    tracking, run_id = _asked_for(config, identity)
    tracker = open_tracker(tracking, identity.root)
    logged = tracker.run(run_id)
    if logged.tags.get("kind") == "sweep":
        command = logged.tags.get("command", "")
        raise SpecError(f"run {run_id} is a whole sweep; repeat it with {command} resume=false")
    was = config_from_tags(logged.tags)
    again = replace(
        was,
        tracking=tracking,
        capture=replace(was.capture, cache_dir=config.capture.cache_dir),
        figures=config.figures,
        verbose=config.verbose,
    )
    files = restored(again, logged, tracker, identity.folder)
    for note in files.notes:
        show(f"rerun:     {note}")
    choices = Choices(**{name: logged.params[name] for name in Choices.__slots__})
    overrides = files.overrides(_overrides(logged))
    # Before the job: a source that is edited while it runs is not what it read.
    identity = identified(files.config, replace(identity, choices=choices, overrides=overrides))
    read = changed_file(files_of(logged.tags), identity.root)
    changed = "" if identity.key == logged.tags.get("config_key") else _CHANGED
    if read is not None:
        changed = f"; but {read}, which its model reads, is not what it was"
    outcome = run_job(files.config, identity)
    if outcome.status != "failed":
        show(f"rerun:     {_compared(logged, outcome)}{changed}")
    return outcome


def _asked_for(config: "Config", identity: JobIdentity) -> tuple[TrackingConfig, str]:
    """Return where to log, and the whole id of the run whose id begins as was typed."""
    asked = override_values(identity.overrides)
    # As it was typed: of 12e45678 Hydra makes a number.
    run_id = asked.get("rerun", str(config.rerun))
    for key in asked:
        if key.partition(".")[0] not in _BESIDE:
            raise SpecError(
                f"rerun={run_id} repeats a run as it was; leave out {key}=, or leave out rerun="
            )
    if config.tracking.name != "mlflow":
        return config.tracking, run_id  # which the tracker refuses in its own words
    from runner.mlflow_find import find_run  # MLflow takes 1 to 2 s

    found = find_run(config.tracking, identity.root, run_id)
    if "tracking.experiment" in asked:
        return config.tracking, found.run_id
    return replace(config.tracking, experiment=found.experiment), found.run_id


def _overrides(logged: LoggedRun) -> tuple[str, ...]:
    """Return what the run was asked for."""
    import json

    return tuple(json.loads(logged.tags.get("overrides", "[]")))


def _compared(logged: LoggedRun, outcome: Outcome) -> str:
    now = finite_metrics(outcome.metrics)
    shared = [name for name in _COMPARED if name in now and name in logged.metrics]
    unlike = [
        f"{name} {now[name]:.7g} (was {logged.metrics[name]:.7g})"
        for name in shared
        if f"{now[name]:.7g}" != f"{logged.metrics[name]:.7g}"
    ]
    if unlike:
        return f"not the same as {logged.run_id}: {', '.join(unlike)}"
    return f"the same as {logged.run_id} in {', '.join(shared) or 'nothing that it logged'}"
