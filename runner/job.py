"""One job from config to files, terminal and tracker; every outcome is kept, a failure too."""

import traceback
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from fxpart.errors import CacheError, FxpartError, InfeasibleError, one_line
from fxpart.saved_assignment import ASSIGNMENT_FILE
from runner.announce import announce_page
from runner.batch_files import sweep_columns, write_batch_files
from runner.batch_report import batch_line
from runner.carry_out import STAGES_FOLDER
from runner.experiment import Result, carried_out, model_spec, plan
from runner.figures import write_figures
from runner.files import (
    Status,
    device_rows,
    schedule_document,
    write_assignment,
    write_result,
    write_table,
)
from runner.headline import INFEASIBLE, device_columns, headline, memory_series
from runner.identity import Choices, config_key, parameters, run_name
from runner.measured import measured_lines
from runner.memory_report import peak_line, peak_rows, tensor_columns
from runner.pipeline_schedule import schedule_line
from runner.plan_files import write_plan_files
from runner.provenance import environment_tags
from runner.replicas import replicas_line
from runner.schedule_plot import schedule_svg
from runner.schedule_trace import write_schedule_trace
from runner.sections import Config
from runner.sweep import SweepIds
from runner.terminal import device_table, progress, show, summary_line
from runner.timeline import write_trace
from runner.tracking import RunLog, open_tracker
from runner.writing import write_text

__all__ = ["RESULT_FILE", "JobIdentity", "Outcome", "is_kept", "keep_failure", "run_job"]

RESULT_FILE, TRACEBACK_FILE = "result.json", "traceback.txt"
_SHOWN = 10
"""The largest tensors of each device in `result.json` and in MLflow's table."""


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
    sweep: SweepIds | None = None
    """The sweep that it is a job of."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a job."""

    status: Status
    error: str | None = None
    """One line, for a job that did not finish or could not be recorded."""


def is_kept(identity: JobIdentity, error: Exception) -> bool:
    """Return whether `error` becomes an outcome: a user's mistake, and in a sweep a bug too.

    The bug of one job must not cost the results of the others; alone, it shows its traceback.
    """
    return isinstance(error, FxpartError) or identity.sweep is not None


def run_job(config: Config, identity: JobIdentity) -> Outcome:
    """Run one experiment, write its files, say it in the terminal, and log it.

    What `is_kept` is an outcome, marked as failed in the tracker; anything else is raised, after
    the run is marked as failed too. A result that cannot be logged stays a result, with an error.
    """
    written: Result | None = None
    try:
        tracker = open_tracker(config.tracking, identity.root)
        with tracker.start(
            run_name(identity.choices),
            parameters(config, identity.choices, identity.overrides),
            {"kind": "run", **environment_tags()},
            identity.sweep.parent_run if identity.sweep else None,
        ) as tracked:
            spec = model_spec(config)
            model = spec.key()
            key = {"config_key": config_key(config, model)}
            try:
                result = plan(config, spec)
            except InfeasibleError:
                tracked.log(metrics=INFEASIBLE, tags=key)
                raise
            # Before the plan is carried out: if that fails, the plan is there.
            _write_plan(config, identity, result, model)
            _show_plan(result)
            result = carried_out(config, spec, result, identity.folder)
            _write_finished(config, identity, result)
            written = result
            _show_end(result, identity.folder)
            with progress("logging to MLflow"):
                _log(result, identity.folder, tracked, key)
        if identity.sweep is None:
            announce_page(tracker.comparison_page())
        return Outcome("finished")
    except Exception as error:
        if not is_kept(identity, error):
            raise
        return keep_failure(config, identity, error, written)


def keep_failure(
    config: Config | None, identity: JobIdentity, error: Exception, written: Result | None = None
) -> Outcome:
    """Write `result.json` of a job that did not finish; `config` is None if it made no sense.

    The files of a `written` result stay: that job did finish, but was not recorded.
    """
    status: Status = "infeasible" if isinstance(error, InfeasibleError) else "failed"
    message, folder = " ".join(str(error).split()), identity.folder
    try:
        if not isinstance(error, FxpartError):
            message = f"{one_line(error)}; traceback in {_shown(folder / TRACEBACK_FILE)}"
            write_text(folder / TRACEBACK_FILE, "".join(traceback.format_exception(error)))
        if written:
            status = "finished"
            _write_finished(config, identity, written, error=message)
        else:
            write_result(
                folder / RESULT_FILE,
                status=status,
                config=_described(config, identity),
                metrics=INFEASIBLE if status == "infeasible" else {},
                error=message,
                sweep_id=identity.sweep.sweep if identity.sweep else None,
            )
    except CacheError as also:
        message = f"{message}; {also}"
    return Outcome(status, message)


def _write_plan(
    config: Config, identity: JobIdentity, result: Result, model: Mapping[str, object]
) -> None:
    graph, folder = result.captured.graph, identity.folder
    placed, evaluation = result.assignment, result.evaluation
    named = {"name": identity.choices.model, **model}
    with progress("writing files"):
        write_assignment(folder / ASSIGNMENT_FILE, graph, result.problem.topology, placed, named)
        # Of what was placed: there sizes are as the allocator rounds them.
        write_figures(folder, result.problem.graph, placed, evaluation)
        write_table(folder / "largest_tensors.csv", tensor_columns(result.peaks))
        write_trace(folder / "trace.json", graph, placed, evaluation)
        write_plan_files(folder, graph, placed)
        if result.batches:
            write_batch_files(folder, result.batches, result.problem.topology)
        if result.schedule:
            write_text(folder / "schedule.svg", schedule_svg(result.schedule))
            write_schedule_trace(folder / "schedule_trace.json", result.schedule)
        _write_config(config, identity)


def _show_plan(result: Result) -> None:
    show(device_table(result.evaluation), summary_line(result.evaluation))
    show(f"peak:      {peak_line(result.peaks)}")
    if result.measured_on:
        show(f"times:     of operators on {result.measured_on}, the same for every device")
    if result.replicas:
        show(f"replicas:  {replicas_line(result.replicas)}")
    if result.batches:
        show(f"batch:     {batch_line(result.batches)}")
    if result.schedule:
        show(f"schedule:  {schedule_line(result.schedule)}")


def _show_end(result: Result, folder: Path) -> None:
    if result.measured:
        show(*measured_lines(result.measured))
    show(f"files:     {_shown(folder)}")


def _write_finished(
    config: Config | None, identity: JobIdentity, result: Result, error: str | None = None
) -> None:
    write_result(
        identity.folder / RESULT_FILE,
        status="finished",
        config=_described(config, identity),
        metrics=headline(result),
        devices=device_rows(result.evaluation),
        peaks=peak_rows(result.peaks, _SHOWN),
        schedule=schedule_document(result.schedule) if result.schedule else None,
        measured=asdict(result.measured) if result.measured else None,
        error=error,
        sweep_id=identity.sweep.sweep if identity.sweep else None,
    )


def _log(result: Result, folder: Path, tracked: RunLog, tags: Mapping[str, str]) -> None:
    tracked.log(
        # Cells of MLflow's tables show a number whole or cut off; seven digits are whole.
        metrics={name: float(f"{value:.7g}") for name, value in headline(result).items()},
        series={"memory_gib": memory_series(result)},
        tables={
            "devices": device_columns(result),
            "largest_tensors": tensor_columns(result.peaks, _SHOWN),
            **({"batch_sweep": sweep_columns(result.batches)} if result.batches else {}),
        },
        artifacts_dir=folder,
        left_out=STAGES_FOLDER,  # weights, which are random
        tags={"mlflow.note.content": summary_line(result.evaluation), **tags},
    )


def _shown(path: Path) -> str:
    """Return the path as the user would type it."""
    here = Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)


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
