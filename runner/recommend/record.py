"""A recommendation in the tracker: a parent run, with a child run for each of the best plans."""

import json
import secrets
import shlex
from collections.abc import Sequence
from dataclasses import replace

from runner.job.identity import JobIdentity, SweepIds
from runner.job.record import environment_tags, job_tags, parameters, run_name
from runner.output.terminal import progress
from runner.plans.evaluate import Costed, Outcome
from runner.plans.request import VARIED, Request
from runner.plans.space import KEYS
from runner.recommend.files import JSON_FILE, PLOT_FILE
from runner.recommend.table import proof
from runner.tracking.tracker import Tracker, announce_page

__all__ = ["logged"]

_SHOWN_ALONE = ("examples_per_s", "latency_ms", "device_memory_gib")


def logged(
    tracker: Tracker,
    command: Sequence[str],
    request: Request,
    outcome: Outcome,
    identity: JobIdentity,
    *,
    typed_texts: Sequence[str],
) -> None:
    """Log the best plans as the runs of a sweep, and announce the page that compares them.

    `command` are the overrides that all plans share, `typed_texts` those of the recommendation.

    These runs have no files, and no key, so that no sweep takes them for its own jobs.
    """
    with progress("logging to MLflow"):
        sweep = secrets.token_hex(8)
        best = outcome.ranking[: request.rows]
        plans = [costed.candidate.plan for costed in best]
        of_settings = [(key, [getattr(plan, name) for plan in plans]) for name, key in KEYS.items()]
        of_choices = [(name, [getattr(plan.variant, name) for plan in plans]) for name in VARIED]
        swept = tuple(key for key, values in (*of_choices, *of_settings) if len(set(values)) > 1)
        typed = shlex.join(typed_texts)
        parent = tracker.start_sweep(
            f"recommend: {typed}"[:100],
            {
                "kind": "sweep",
                "sweep_id": sweep,
                "swept": json.dumps(swept),
                "folder": str(identity.folder),
                "overrides": json.dumps(identity.overrides),
                "command": f"python -m runner.recommend {typed}",
                "question": f"Which plan has the best {request.objective}?",
                **environment_tags(),
            },
        )
        for costed in best:
            _log_plan(tracker, command, costed, identity, SweepIds(sweep, parent, swept))
        first = outcome.ranking[0].metrics
        tracker.log_sweep(
            parent,
            metrics={
                "plans": float(outcome.total),
                "plans_that_fit": float(len(outcome.ranking)),
                **{name: first[name] for name in _SHOWN_ALONE if name in first},
            },
            tags={"mlflow.note.content": proof(request, outcome)},
            files=[identity.folder / JSON_FILE, identity.folder / PLOT_FILE],
        )
        tracker.finish_sweep(parent)
    announce_page(tracker.comparison_page(parent))


def _log_plan(
    tracker: Tracker,
    command: Sequence[str],
    costed: Costed,
    identity: JobIdentity,
    ids: SweepIds,
) -> None:
    candidate, plan = costed.candidate, costed.candidate.plan
    overrides = (*command, *candidate.overrides)
    devices = plan.variant.devices or identity.choices.devices
    choices = replace(identity.choices, mode=plan.mode, devices=devices)
    job = JobIdentity(choices, overrides, identity.folder, identity.root, ids)
    with tracker.start(
        run_name(choices, overrides, ids.swept),
        parameters(candidate.config, choices, overrides),
        job_tags(candidate.config, job),
        ids.parent_run,
    ) as log:
        # Seven digits, as `runner.job.job` logs them.
        log.log(metrics={name: float(f"{value:.7g}") for name, value in costed.metrics.items()})
