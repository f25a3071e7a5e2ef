"""One job from config to files, terminal and tracker; every outcome is kept, a failure too."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from fxpart.errors import FxpartError, InfeasibleError
from runner.announce import announce_page
from runner.config import Config
from runner.experiment import Result, model_spec, run
from runner.figures import write_figures
from runner.files import Status, device_rows, write_assignment, write_result
from runner.headline import INFEASIBLE, device_columns, headline, memory_series
from runner.identity import Choices, config_key, parameters, run_name
from runner.provenance import environment_tags
from runner.terminal import device_table, progress, show, summary_line
from runner.timeline import write_trace
from runner.tracking import RunLog, TrackingConfig, open_tracker
from runner.writing import write_text

__all__ = ["RESULT_FILE", "JobIdentity", "Outcome", "keep_failure", "run_job"]

ASSIGNMENT_FILE, RESULT_FILE = "assignment.json", "result.json"


@dataclass(frozen=True, slots=True)
class JobIdentity:
    """Where a job stands in the world."""

    choices: Choices
    overrides: tuple[str, ...]
    """What was asked for on the command line."""
    folder: Path
    """Where its files go."""
    root: Path
    """Where the user started it; MLflow's default store lies in ``outputs`` below."""
    parent_run_id: str | None = None
    """The sweep's run in MLflow."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a job."""

    status: Status
    error: str | None = None
    """One line, for a job that did not finish."""


def run_job(config: Config, identity: JobIdentity) -> Outcome:
    """Run one experiment, write its files, log it, and say it in the terminal.

    A mistake that the user can mend is an outcome, marked as failed in the tracker; anything else
    is raised, after the run is marked as failed too.
    """
    tags = {"kind": "run", "config_key": config_key(config), **environment_tags()}
    try:
        tracker = open_tracker(TrackingConfig(**asdict(config.tracking)), identity.root)
        with tracker.start(
            run_name(identity.choices),
            parameters(config, identity.choices),
            tags,
            identity.parent_run_id,
        ) as tracked:
            _finish(config, identity, tracked)
        if identity.parent_run_id is None:
            announce_page(tracker.comparison_page())
        return Outcome("finished")
    except FxpartError as error:
        return keep_failure(config, identity, error)


def keep_failure(config: Config | None, identity: JobIdentity, error: FxpartError) -> Outcome:
    """Write `result.json` of a job that did not finish; `config` is None if it made no sense."""
    status: Status = "infeasible" if isinstance(error, InfeasibleError) else "failed"
    message = " ".join(str(error).split())
    write_result(
        identity.folder / RESULT_FILE,
        status=status,
        config=_described(config, identity),
        metrics=INFEASIBLE if status == "infeasible" else {},
        error=message,
    )
    return Outcome(status, message)


def _finish(config: Config, identity: JobIdentity, tracked: RunLog) -> None:
    try:
        result = run(config)
    except InfeasibleError:
        tracked.log(metrics=INFEASIBLE)
        raise
    metrics = headline(result)
    with progress("writing files"):
        _write_files(config, identity, result, metrics)
    with progress("logging to MLflow"):
        tracked.log(
            # Cells of MLflow's tables show a number whole or cut off; seven digits are whole.
            metrics={name: float(f"{value:.7g}") for name, value in metrics.items()},
            series={"memory_gib": memory_series(result)},
            tables={"devices": device_columns(result)},
            artifacts_dir=identity.folder,
            tags={"mlflow.note.content": summary_line(result.evaluation)},
        )
    show(device_table(result.evaluation), summary_line(result.evaluation))
    show(f"files:     {_shown(identity.folder)}")


def _shown(folder: Path) -> str:
    """Return the folder as the user would type it."""
    here = Path.cwd()
    return str(folder.relative_to(here)) if folder.is_relative_to(here) else str(folder)


def _write_files(
    config: Config, identity: JobIdentity, result: Result, metrics: Mapping[str, float]
) -> None:
    graph, folder = result.captured.graph, identity.folder
    placed, evaluation = result.assignment, result.evaluation
    model = model_spec(config).key()
    write_assignment(folder / ASSIGNMENT_FILE, graph, result.problem.topology, placed, model)
    write_figures(folder, graph, placed, evaluation)
    write_trace(folder / "trace.json", graph, placed, evaluation)
    _write_config(config, identity)
    write_result(
        folder / RESULT_FILE,
        status="finished",
        config=_described(config, identity),
        metrics=metrics,
        devices=device_rows(evaluation),
    )


def _write_config(config: Config, identity: JobIdentity) -> None:
    from omegaconf import OmegaConf

    write_text(identity.folder / "config" / "resolved.yaml", OmegaConf.to_yaml(asdict(config)))
    overrides = "".join(f"{override}\n" for override in identity.overrides)
    write_text(identity.folder / "config" / "overrides.txt", overrides)


def _described(config: Config | None, identity: JobIdentity) -> dict[str, object]:
    return {
        "choices": asdict(identity.choices),
        "overrides": identity.overrides,
        "resolved": asdict(config) if config else None,
    }
