"""Repeat a logged run: ``rerun=<run id>``, or the folder of its files."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path

from fxpart.errors import SpecError
from fxpart.support.regular_file import read_regular
from runner.config.paths import shown_path
from runner.config.schema import Config, TrackingConfig
from runner.config.tags import config_from_tags
from runner.job.files import (
    RESULT_FILE,
    InputFile,
    inputs_of,
    kept_name,
    named_files,
    with_file,
    write_inputs,
)
from runner.job.identity import Choices, JobIdentity, identified, override_values
from runner.job.job import Outcome, run_job
from runner.job.record import RAN_KEY
from runner.output.result_files import read_result
from runner.output.terminal import show
from runner.tracking.mlflow_values import finite_metrics
from runner.tracking.open_tracker import open_tracker
from runner.tracking.tracker import LoggedRun, Tracker

__all__ = ["Restored", "rerun", "restored"]

_BESIDE = ("rerun", "tracking", "verbose", "figures")
"""Sections that may be overridden with ``rerun``: none of them affects a result."""
_CHANGED = (
    "; but an input of its result has changed: a source of the model, a file of model.depends_on, "
    "fxpart, torch, or the machine"
)
_KEY = re.compile(r"[0-9a-f]{16}")
_COMPARED = ("latency_ms", "peak_memory_gib", "partitions", "transfer_gib", "feasible")

_SEARCHES = "runner.recommend"
"""The command whose runs are those of a sweep that is always searched anew."""


def rerun(config: Config, identity: JobIdentity) -> Outcome:
    """Repeat the run named by ``rerun=`` from its logged configuration, and print the comparison.

    It is logged in the experiment of the first run, unless ``tracking.experiment`` is overridden.

    Raises:
        SpecError: if there are other overrides, or if the run does not exist, is a sweep, has no
            configuration, or read a file that has changed or is gone, without an intact copy in
            the store.
        TrackingError: if the store cannot be read.

    """
    tracking, run_id = _asked_for(config, identity)
    tracker = open_tracker(tracking, identity.root)
    logged = tracker.run(run_id)
    if logged.tags.get("kind") == "sweep":
        command = logged.tags.get("command", "")
        resumes = "" if _SEARCHES in command else " resume=false"
        raise SpecError(f"run {run_id} is a sweep; repeat it with {command}{resumes}")
    old = config_from_tags(logged.tags)
    restored_config = replace(
        old,
        tracking=tracking,
        capture=replace(old.capture, cache_dir=config.capture.cache_dir),
        figures=config.figures,
        verbose=config.verbose,
    )
    files = restored(restored_config, logged, tracker, identity.folder)
    for note in files.notes:
        show(f"rerun:     {note}")
    choices = Choices(**{name: logged.params[name] for name in Choices.__slots__})
    overrides = files.overrides(json.loads(logged.tags.get("overrides", "[]")))
    # Hash before the job runs: sources edited meanwhile are not the ones it read.
    identity = identified(files.config, replace(identity, choices=choices, overrides=overrides))
    logged_key = logged.tags.get(RAN_KEY) or logged.tags.get("config_key")
    changed = "" if identity.key == logged_key else _CHANGED
    outcome = run_job(files.config, identity)
    if outcome.status != "failed":
        show(f"rerun:     {_compared(logged, outcome)}{changed}")
    return outcome


def _asked_for(config: Config, identity: JobIdentity) -> tuple[TrackingConfig, str]:
    """Return where to log, and the full id of the run from a prefix of it or its folder."""
    values = override_values(identity.overrides)
    # Taken from the override text: Hydra parses 12e45678 as a number.
    run_id = values.get("rerun", str(config.rerun))
    for key in values:
        if key.partition(".")[0] not in _BESIDE:
            raise SpecError(f"rerun={run_id} repeats a run unchanged; leave out {key}=, or rerun=")
    if "/" in run_id and not (identity.root / run_id).is_dir():
        raise SpecError(f"there is no folder {run_id}; give the folder of a run, or its id")
    if config.tracking.name != "mlflow":
        return config.tracking, run_id  # rejected by the tracker
    from runner.tracking.mlflow_runs import find_run  # MLflow takes 1 to 2 s

    run = find_run(config.tracking, identity.root, run_id, _key_of_folder(identity.root / run_id))
    if "tracking.experiment" in values:
        return config.tracking, run.run_id
    return replace(config.tracking, experiment=run.experiment), run.run_id


def _key_of_folder(folder: Path) -> str:
    """Return the key in the result of a run's `folder`; empty if this is not a folder."""
    if not folder.is_dir():
        return ""
    key = read_result(folder / RESULT_FILE).get("key")
    if not isinstance(key, str) or not _KEY.fullmatch(key):
        raise SpecError(f"{folder / RESULT_FILE} has no key of a run; give the run's id")
    return key


def _compared(logged: LoggedRun, outcome: Outcome) -> str:
    metrics = finite_metrics(outcome.metrics)
    shared = [name for name in _COMPARED if name in metrics and name in logged.metrics]
    unlike = [
        f"{name} {metrics[name]:.7g} (was {logged.metrics[name]:.7g})"
        for name in shared
        if f"{metrics[name]:.7g}" != f"{logged.metrics[name]:.7g}"
    ]
    if unlike:
        return f"not the same as {logged.run_id}: {', '.join(unlike)}"
    return f"the same as {logged.run_id} in {', '.join(shared) or 'nothing that it logged'}"


# The input files of the run: unchanged, or from its own copies.

_PLAIN = re.compile(r"[\w./+-]+", re.ASCII)
"""Text that needs no quotes in a Hydra override."""


@dataclass(frozen=True, slots=True)
class Restored:
    """A configuration whose input files have the same content as in the repeated run."""

    config: Config
    places: Mapping[str, str]
    """Paths of the run's own copies of files that have changed, by key; usually empty."""
    notes: tuple[str, ...]
    """A line for each changed file."""

    def overrides(self, logged: Sequence[str]) -> tuple[str, ...]:
        """Return the logged overrides, with the paths of these copies."""
        return tuple(_override(override, self.places) for override in logged)


def restored(config: Config, run: LoggedRun, tracker: Tracker, folder: Path) -> Restored:
    """Return `config`, as logged with `run`, with input files of the same content as in the run.

    Unchanged files keep their paths. For a changed one, the tracker's copy is written to the job's
    `folder` and named instead. Runs from before copies existed keep all paths.

    Raises:
        SpecError: if a file has changed and its copy is missing or damaged, or if `config` does
            not name a file of the run.
        TrackingError: if the store fails.
        CacheError: if `folder` cannot be written.

    """
    named, copies, notes = named_files(config), [], []
    for key, digest in inputs_of(run.run_id, run.tags).items():
        path = named.get(key)
        if path is None:
            raise SpecError(
                f"run {run.run_id} has read a file {key}, which its configuration does not name;"
                " run it again from its overrides"
            )
        state = _change(path, digest)
        if state is not None:
            description = f"{key}={path} {state}"
            copies.append(InputFile(key, _copy(run, tracker, key, digest, description)))
            notes.append(f"{description}; read as the run has kept it")
    if not copies:
        return Restored(config, {}, ())
    write_inputs(copies, folder)
    places = {copy.key: shown_path(folder / kept_name(copy.key)) for copy in copies}
    for key, copied in places.items():
        config = with_file(config, key, copied)
    return Restored(config, places, tuple(notes))


def _change(path: Path, digest: str) -> str | None:
    """Return how a file has changed, as text; None if it has not."""
    try:
        return None if sha256(read_regular(path)).hexdigest() == digest else "has changed since"
    except FileNotFoundError:
        return "is gone"
    except OSError as error:
        return f"cannot be read ({error.strerror or error})"


def _copy(run: LoggedRun, tracker: Tracker, key: str, digest: str, what: str) -> bytes:
    """Return the run's own copy of a file; `what` describes the file for error messages."""
    name = kept_name(key)
    content = tracker.read_artifact(run.run_id, name)
    if content is not None and sha256(content).hexdigest() == digest:
        return content
    state = "missing" if content is None else "damaged"
    raise SpecError(
        f"rerun={run.run_id}: {what}, and the run's own copy of it in the store, {name}, is"
        f" {state}; put the file back, or leave out rerun= and give another {key}="
    )


def _override(override: str, places: Mapping[str, str]) -> str:
    """Return an override with its file replaced by the copy in `places`, if any."""
    key = override.partition("=")[0]
    path = places.get(key.lstrip("+"))
    if path is None:
        return override
    return f"{key}={path}" if _PLAIN.fullmatch(path) else f"{key}={_quoted(path)}"


def _quoted(text: str) -> str:
    from hydra.core.override_parser.types import Quote, QuotedString

    return str(QuotedString(text, Quote.single).with_quotes())
