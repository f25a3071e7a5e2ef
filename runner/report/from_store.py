"""Read a sweep from the store: which sweep, its jobs, and the folders of their files."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fxpart.errors import SpecError, nearest_names
from runner.config.tags import config_text
from runner.output.result_files import SETTLED
from runner.report.sweep_data import LATEST, SweepData, SweepRow
from runner.tracking.tracker import LoggedRun, Runs, swept_keys

__all__ = [
    "all_runs",
    "chosen_sweep",
    "config_value",
    "job_folders",
    "sweep_from_store",
    "sweep_keys",
    "sweeps_of",
]

_LEAST_PREFIX = 4
"""Least characters of a prefix of a run's id."""
_RESULT = "result.json"
"""The file that each job leaves, even if it does not fit."""
_STATUSES = {"FINISHED": "finished", "FAILED": "failed", "KILLED": "cut_off"}
"""Statuses of runs without the tag ``outcome``; others are running."""


def sweeps_of(source: Runs) -> list[LoggedRun]:
    """Return the parent runs of an experiment's sweeps, newest first."""
    return source.runs({"kind": "sweep"})[::-1]


def chosen_sweep(sweeps: Sequence[LoggedRun], identifier: str, experiment: str) -> LoggedRun:
    """Return the sweep of `identifier`: ``latest``, a run's id, or a unique prefix of one.

    Raises `SpecError` if there is none, or more than one.
    """
    if not sweeps:
        raise SpecError(
            f"experiment {experiment!r} has no sweep; run one with -m, or show single runs with"
            " --sweep all"
        )
    if identifier == LATEST:
        return sweeps[0]
    prefix = identifier if len(identifier) >= _LEAST_PREFIX else f"{identifier}?"
    matches = [sweep for sweep in sweeps if sweep.run_id.startswith(prefix)]
    if len(matches) == 1:
        return matches[0]
    if matches:
        raise SpecError(
            f"{len(matches)} sweeps of {experiment!r} begin with {identifier!r}; give all of it"
        )
    ids = [sweep.run_id for sweep in sweeps]
    raise SpecError(
        f"experiment {experiment!r} has no sweep {identifier!r}; {nearest_names(identifier, ids)}"
    )


def all_runs(source: Runs, sweeps: Sequence[LoggedRun], experiment: str) -> SweepData:
    """Return all jobs of an experiment as one sweep. Raises `SpecError` if there are none."""
    runs = source.runs({"kind": "run"})
    if not runs:
        raise SpecError(f"experiment {experiment!r} has no runs; run something in it first")
    swept = dict.fromkeys(key for sweep in reversed(sweeps) for key in swept_keys(sweep.tags))
    roots = [Path(folder) for sweep in sweeps if (folder := sweep.tags.get("folder"))]
    jobs = _sweep_from_runs(
        runs,
        title=f"{experiment}: all runs",
        swept=tuple(swept),
        started_ms=min(run.start_ms for run in runs),
        folders=job_folders(roots),
    )
    return replace(jobs, of_several=True)


def sweep_from_store(source: Runs, parent: LoggedRun, also: Iterable[str] = ()) -> SweepData:
    """Return the sweep of `parent` with all runs that belong to it, each job once.

    `also` are keys to fill in for each job, besides the swept ones.

    Raises `TrackingError` if the store fails.
    """
    runs = _jobs_of(source, parent)
    return _sweep_from_runs(
        runs,
        title=parent.name,
        question=parent.tags.get("question", ""),
        swept=swept_keys(parent.tags),
        started_ms=parent.start_ms,
        command=parent.tags.get("command"),
        folders=job_folders(_roots(runs, [parent, *source.runs({"kind": "sweep"})])),
        also=also,
    )


def sweep_keys(source: Runs, parents: Sequence[LoggedRun]) -> tuple[str, ...]:
    """Return the swept keys of the sweeps of `parents`, and all parameters of their jobs."""
    swept = [key for parent in parents for key in swept_keys(parent.tags)]
    runs = [run for parent in parents for run in _jobs_of(source, parent)]
    return tuple(dict.fromkeys((*swept, *(key for run in runs for key in run.params))))


def _jobs_of(source: Runs, parent: LoggedRun) -> list[LoggedRun]:
    """Return the job runs of the sweep of `parent`, oldest first."""
    sweep = parent.tags.get("sweep_id")
    runs = (
        source.runs_of_sweep(sweep) if sweep else source.runs({"mlflow.parentRunId": parent.run_id})
    )
    return [run for run in runs if run.tags.get("kind") == "run"]


def _roots(runs: Sequence[LoggedRun], sweeps: Sequence[LoggedRun]) -> list[Path]:
    """Return the folders of the first of `sweeps`, and of those that ran any of `runs`.

    The files of a job run by another sweep are in that sweep's folder.
    """
    ran = {run.tags.get("mlflow.parentRunId") for run in runs}
    tags = [sweep.tags for i, sweep in enumerate(sweeps) if i == 0 or sweep.run_id in ran]
    return [Path(folder) for tag in tags if (folder := tag.get("folder"))]


def job_folders(roots: Iterable[Path]) -> dict[str, str]:
    """Return the folders of jobs below `roots`, by job key.

    If a job has several folders, the last one written counts. Missing or unreadable ones are
    skipped: a store may name another machine's folders.
    """
    newest: dict[str, tuple[int, str]] = {}
    for root in dict.fromkeys(roots):
        for path in root.rglob(_RESULT) if root.is_absolute() else ():
            try:
                result = json.loads(path.read_bytes())
                written_ns = path.stat().st_mtime_ns
            except (OSError, ValueError):
                continue
            key = result.get("key") if isinstance(result, dict) else None
            if isinstance(key, str):
                newest[key] = max(newest.get(key, (0, "")), (written_ns, str(path.parent)))
    return {key: folder for key, (_, folder) in newest.items()}


def _sweep_from_runs(
    runs: Iterable[LoggedRun],
    *,
    title: str,
    question: str = "",
    swept: tuple[str, ...] = (),
    started_ms: int | None = None,
    command: str | None = None,
    folders: Mapping[str, str] | None = None,
    also: Iterable[str] = (),
) -> SweepData:
    """Return `runs` as one sweep. Of several runs with the same key, the last settled one counts.

    `folders` are those of jobs, by key; `also` is as in `sweep_from_store`.
    """
    keys = tuple(dict.fromkeys((*swept, *also)))
    run_of: dict[str, LoggedRun] = {}
    for run in runs:
        key = run.tags.get("config_key") or run.run_id
        earlier = run_of.get(key)
        if earlier is None or _settled(run) or not _settled(earlier):
            run_of[key] = run
    rows = tuple(_row(run, keys, folders or {}) for run in run_of.values())
    return SweepData(title, question, swept, rows, started_ms, command)


def _settled(run: LoggedRun) -> bool:
    return _status(run) in SETTLED


def _status(run: LoggedRun) -> str:
    return run.tags.get("outcome") or _STATUSES.get(run.status, "running")


def _row(run: LoggedRun, metrics: Sequence[str], folders: Mapping[str, str]) -> SweepRow:
    missing = [key for key in metrics if key not in run.params]
    config = _config(run.tags) if missing else {}
    # Unset choices are not logged as parameters, such as `schedule` of a run without one.
    filled = {key: text for key in missing if (text := config_value(config, key)) is not None}
    return SweepRow(
        name=run.name,
        settings={**run.params, **filled},
        metrics=run.metrics,
        status=_status(run),
        error=run.tags.get("error"),
        run_id=run.run_id,
        folder=folders.get(run.tags.get("config_key", "")),
    )


def _config(tags: Mapping[str, str]) -> Mapping[str, Any]:
    """Return the resolved configuration from the pieces in the tags; empty without one."""
    try:
        config = json.loads(config_text(tags) or "{}")
    except ValueError:
        return {}
    return config if isinstance(config, dict) else {}


def config_value(config: Mapping[str, Any], key: str) -> str | None:
    """Return the value of a dotted key as text, like a parameter; the name of a section."""
    value: Any = config
    for part in key.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return None
        value = value[part]
    if isinstance(value, Mapping):
        value = value.get("name")
    if value is None:
        return None
    return str(value).lower() if isinstance(value, bool) else str(value)
