"""One job from config to files, terminal and tracker; every outcome is kept, a failure too."""

import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from fxpart.errors import (
    CacheError,
    FxpartError,
    InfeasibleError,
    NotApplicableError,
    one_line,
)
from runner.config.paths import shown_path
from runner.config.sections import BUDGET, RECOMMEND, Config
from runner.errors import TrackingError, message_of
from runner.experiment.batch_report import batch_line
from runner.experiment.budget import within_budget
from runner.experiment.carry_out import STAGES_FOLDER
from runner.experiment.device_memory import memory_line
from runner.experiment.experiment import carried_out, plan
from runner.experiment.generation import generation_lines
from runner.experiment.headline import INFEASIBLE, device_columns, headline, memory_series
from runner.experiment.measured import measured_lines
from runner.experiment.memory_report import peak_line, tensor_columns
from runner.experiment.mesh import replica_count
from runner.experiment.model_spec import model_spec
from runner.experiment.objective import objective_line
from runner.experiment.offload import carried_by, offload_line
from runner.experiment.pipeline_schedule import schedule_line
from runner.experiment.rates import rate_line
from runner.experiment.replicas import replicas_line
from runner.experiment.result import Result
from runner.experiment.runtime import host_line
from runner.experiment.subject import is_captured
from runner.experiment.tensor_split import split_line
from runner.experiment.whole_modules import carrier_line, whole_line
from runner.experiment.zero import zero_line
from runner.job.attempts import at_work_alone
from runner.job.batch_files import sweep_columns
from runner.job.files import (
    RESULT_FILE,
    SHOWN_TENSORS,
    inputs_tag,
    read_inputs,
    write_finished,
    write_inputs,
    write_plan,
    write_unfinished,
)
from runner.job.identity import (
    JobIdentity,
    identified,
    inputs_key,
    override_values,
    refuse_changed,
    without_elsewhere,
)
from runner.job.record import job_tags, parameters, run_name
from runner.job.serving_files import serving_columns, serving_text
from runner.output.result_files import Status
from runner.output.terminal import device_table, progress, show, summary_line, without_progress
from runner.output.text_files import write_text
from runner.plans.chosen import recommended_plan
from runner.tracking.open_tracker import open_tracker
from runner.tracking.tracker import ALL_BUT_INPUTS, RunLog, Tracker, announce_page

__all__ = [
    "RESULT_FILE",
    "TRACEBACK_FILE",
    "Outcome",
    "is_kept",
    "keep_failure",
    "run_job",
]


TRACEBACK_FILE = "traceback.txt"


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of a job."""

    status: Status
    error: str | None = None
    """One line, for a job that did not finish or could not be recorded."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Those of `runner.experiment.headline`; of a job that failed, none."""
    run_id: str | None = None
    """Of its run in the tracker."""


@dataclass(slots=True)
class _Progress:
    """How far a job has come, for what is kept of it when it fails."""

    result: Result | None = None
    """The result that is in its files."""
    log: RunLog | None = None
    unlogged: str | None = None
    """Why there is no log."""

    @property
    def problem(self) -> str | None:
        """Why the job is not in the tracker, None where it is."""
        return self.log.problem if self.log else self.unlogged


def is_kept(identity: JobIdentity, error: Exception) -> bool:
    """Return whether `error` becomes an outcome: a user's mistake, and in a sweep a bug too.

    The bug of one job must not cost the results of the others; alone, it shows its traceback.
    """
    return isinstance(error, FxpartError) or identity.sweep is not None


def run_job(config: Config, identity: JobIdentity) -> Outcome:
    """Run one experiment, write its files, print it, and log it.

    An error that `is_kept` becomes the outcome; any other is raised. Both mark the run as failed in
    the tracker. A result that cannot be logged stays a result, with an error. The job of a sweep
    prints nothing, unless it is verbose.
    """
    identity = identified(config, identity)
    so_far = _Progress()
    verbose = identity.sweep is None or config.verbose
    try:
        if config.mode.name == RECOMMEND:
            config, identity = _decided(config, identity, recommended_plan, verbose=verbose)
        elif config.checkpointing == BUDGET:
            config, identity = _decided(config, identity, within_budget, verbose=verbose)
    except Exception as error:
        if not is_kept(identity, error):
            raise
        return keep_failure(config, identity, error)
    try:
        with nullcontext() if verbose else without_progress():
            _run_tracked(config, identity, so_far, verbose=verbose)
    except Exception as error:
        if not is_kept(identity, error):
            raise
        return _failed(config, identity, error, so_far)
    assert so_far.result is not None, "a job that raises nothing has a result"
    run_id = so_far.log.run_id if so_far.log else None
    return Outcome("finished", metrics=headline(so_far.result), run_id=run_id)


def _decided(
    config: Config,
    identity: JobIdentity,
    decide: Callable[[Config], tuple[Config, str]],
    *,
    verbose: bool,
) -> tuple[Config, JobIdentity]:
    """Return what `decide` makes of `config`, to be run as any other, with its inputs."""
    with nullcontext() if verbose else without_progress():
        chosen, summary = decide(config)
    refuse_changed(config, identity)
    if verbose:
        show(f"plan:      {summary}")
    return chosen, replace(identity, inputs=inputs_key(chosen, model_spec(chosen).key()))


def _run_tracked(
    config: Config, identity: JobIdentity, so_far: _Progress, *, verbose: bool
) -> None:
    with ExitStack() as stack:
        with _opening_run(config, identity, stack) as opened:
            try:
                spec = model_spec(config)
                model = spec.key()
                # In a sweep a capture for advice alone would take longer than the job.
                result = plan(config, spec, may_capture=identity.sweep is None)
            except InfeasibleError:  # a result, too
                refuse_changed(config, identity)
                raise
            finally:
                tracker, so_far.log = opened()
        refuse_changed(config, identity)
        # Before the plan is carried out: if that fails, the plan is there.
        write_plan(config, identity, result, model)
        if verbose:
            _show_plan(config, result)
        result = carried_out(config, spec, result, identity.folder)
        write_finished(config, identity, result, key=identity.key)
        so_far.result = result
        if verbose:
            _show_end(result, identity.folder)
        with progress("logging to MLflow"):
            _log(config, result, identity.folder, so_far.log)
    if so_far.log.problem:
        raise TrackingError(so_far.log.problem)
    if identity.sweep is None:
        announce_page(tracker.comparison_page())


@contextmanager
def _opening_run(
    config: Config, identity: JobIdentity, stack: ExitStack
) -> Iterator[Callable[[], tuple[Tracker, RunLog]]]:
    """Open the run before the block, or beside it where it may be; yield what returns it, open."""
    if _may_open_beside(config, identity):
        # While it is imported MLflow has some warnings ignored. Filters are the process's, and come
        # and go with what other threads do with them.
        warnings.filterwarnings("ignore", module=r"(mlflow|requests|urllib3)\b")
        with ThreadPoolExecutor(1) as beside:
            yield beside.submit(_open_run, config, identity, stack).result
    else:
        opened = _open_run(config, identity, stack)
        yield lambda: opened


def _may_open_beside(config: Config, identity: JobIdentity) -> bool:
    """Return whether the run may be opened beside the plan: MLflow's imports take as long.

    Only where the plan is compiled loops for the most part, which leave Python to others. A capture
    imports torch, and changes warnings and streams for all threads; what is measured must have the
    machine for itself. And only in a file of this machine: a server that does not answer is
    reported before the plan is made.
    """
    from runner.tracking.mlflow_store import sqlite_path, store_uri

    if (
        identity.sweep
        or config.tracking.name != "mlflow"
        or (config.latency.source not in ("roofline", "kernels"))
    ):
        return False
    try:
        is_file = sqlite_path(store_uri(config.tracking, identity.root)) is not None
        return is_file and is_captured(config, model_spec(config))
    except FxpartError:  # which the plan, or the opening, raises again
        return False


def _open_run(config: Config, identity: JobIdentity, stack: ExitStack) -> tuple[Tracker, RunLog]:
    """Open the tracker and the job's run in it, which `stack` closes; keep what the job reads."""
    alone = identity.sweep is None
    tracker = open_tracker(config.tracking, identity.root, must_answer=alone)
    tags = stack.enter_context(at_work_alone(tracker, identity.root)) if alone else {}
    inputs = read_inputs(config)
    log = stack.enter_context(
        tracker.start(
            _name(identity),
            parameters(config, identity.choices, identity.overrides),
            {**job_tags(config, identity), **inputs_tag(inputs), **tags},
            identity.sweep.parent_run if identity.sweep else None,
            identity.folder,
        )
    )
    write_inputs(inputs, identity.folder)
    if inputs:  # with the run, too, however that ends
        log.log(artifacts_dir=identity.folder, left_out=ALL_BUT_INPUTS)
    return tracker, log


def _show_plan(config: Config, result: Result) -> None:
    """Print the table of devices, and a line for each thing that was asked for."""
    has_tensors = result.subject.workload is None
    table = device_table(
        result.evaluation, _group(result), with_memory=has_tensors, n_devices=result.n_devices
    )
    show(result.subject_line, table, _summary(config, result))
    if has_tensors:
        show(f"peak:      {peak_line(result.device_peaks, result.copy_rooms)}")
    if line := objective_line(result.problem, result.evaluation, result.n_devices):
        objective = result.problem.objective  # the line of memory is that of the device
        title = {"throughput": "load", "memory": "objective"}.get(objective, objective)
        show(f"{f'{title}:':11}{line}")
    if result.device_memory:
        show(f"memory:    {memory_line(result.device_needs)}")
    for line in _times_lines(result):
        show(line)
    if result.split:
        title = "tensor:" if result.split.size > 1 else "sharing:"
        show(f"{title:11}{split_line(result.split)}")
    if result.shards:
        show(f"zero:      {zero_line(config, result.shards)}")
    if result.offloaded:
        show(f"tiers:     {offload_line(config, result.offloaded)}")
    for line in _replica_lines(config, result):
        show(line)
    if result.batches:
        show(f"batch:     {batch_line(result.batches)}")
    show(*_generation_lines(result))
    if result.other_sizes:
        show(serving_text(result.other_sizes))
    if result.schedule:
        show(f"schedule:  {schedule_line(result.schedule, _rate(result))}")
    if result.whole:
        show(f"whole:     {whole_line(result.whole)}")
    tools = (
        carried_by(result.offloaded)
        if result.offloaded
        else carrier_line(config, result.problem, result.assignment, result.whole)
    )
    show(f"runs with: {tools}")


def _serving_sweep(result: Result) -> dict[str, dict[str, list[object]]]:
    rows = result.other_sizes
    return {"serving_sweep": serving_columns(rows)} if rows else {}


def _generation_lines(result: Result) -> tuple[str, ...]:
    if result.generation is None:
        return ()
    lines = generation_lines(result.generation, result.evaluation, _rate(result))
    return tuple(f"{f'{title}:':11}{line}" for title, line in lines)


def _rate(result: Result) -> str:
    return rate_line(headline(result), trains=result.trains)


def _times_lines(result: Result) -> Iterator[str]:
    """Yield where times come from, and that the host decides if it does in a pass by itself."""
    if result.measured_on:
        yield f"times:     of operators on {result.measured_on}, the same for every device"
    if result.times_note:
        yield f"times:     {result.times_note}"
    issue_s = result.problem.costs.issue_s.tolist()
    if result.schedule is None and any(issue_s):
        started = len(set(issue_s) - {0.0})
        if by_host := host_line(issue_s[-1], result.evaluation.latency_s, started):
            yield f"host:      {by_host}"


def _replica_lines(config: Config, result: Result) -> Iterator[str]:
    """Yield what replicas cost, and that a pipeline is none where one device has all of a model."""
    stages, more = "there is one stage", "more devices"
    if result.replicas:
        yield f"replicas:  {replicas_line(result.replicas, _group(result))}"
        stages, more = "each replica is one stage", f"{more} or a smaller data_parallel"
    if config.mode.name == "pipeline" and result.n_devices == 1:
        yield f"pipeline:  none, {stages}; give {more}"


def _summary(config: Config, result: Result) -> str:
    return summary_line(
        result.evaluation,
        None if result.schedule or result.generation else _rate(result),
        with_gap=result.has_gap,
        group=_group(result),
        replicas=replica_count(config),
        of=" of the last token" if result.generation else "",
        n_devices=result.n_devices,
    )


def _group(result: Result) -> int:
    """Return how many devices each row of the table stands for."""
    return result.split.size if result.split else 1


def _show_end(result: Result, folder: Path) -> None:
    """Print what was measured, and where the files are."""
    if result.measured:
        show(*measured_lines(result.measured))
    show(f"files:     {shown_path(folder)}")


def keep_failure(config: Config | None, identity: JobIdentity, error: Exception) -> Outcome:
    """Log a job that was never started as failed; of a sweep, write its `result.json` too.

    `config` is None if it made no sense; then the job is logged where its identity says. A run by
    itself leaves no folder but for what the store did not take.
    """
    identity = identified(config, identity)
    so_far = _Progress()
    tracking = config.tracking if config else identity.tracking
    if tracking is not None:
        values = override_values(without_elsewhere(identity.overrides))
        try:
            tracker = open_tracker(tracking, identity.root, must_answer=identity.sweep is None)
            with tracker.start(
                _name(identity),
                {**asdict(identity.choices), **{k: v for k, v in values.items() if "." in k}},
                job_tags(config, identity),
                identity.sweep.parent_run if identity.sweep else None,
                identity.folder,
            ) as so_far.log:
                raise error
        except Exception as raised:
            if raised is not error:
                so_far.unlogged = one_line(raised)
    if identity.sweep is not None:
        return _failed(config, identity, error, so_far)
    with suppress(OSError):  # it is not empty, or not there
        identity.folder.rmdir()
    message = message_of(error)
    return Outcome("failed", f"{message}; {so_far.problem}" if so_far.problem else message)


def _failed(
    config: Config | None, identity: JobIdentity, error: Exception, so_far: _Progress
) -> Outcome:
    """Return the outcome of a job that raised `error`, and write its `result.json`.

    One that has a result did finish, and was not recorded: its files stay.
    """
    status: Status = "infeasible" if isinstance(error, InfeasibleError) else "failed"
    if isinstance(error, NotApplicableError) and identity.sweep:  # alone it is a mistake
        status = "not_applicable"
    message, folder = message_of(error), identity.folder
    try:
        if not isinstance(error, FxpartError):
            message = f"{one_line(error)}; traceback in {shown_path(folder / TRACEBACK_FILE)}"
            write_text(folder / TRACEBACK_FILE, "".join(traceback.format_exception(error)))
        if so_far.result:
            status = "finished"
            write_finished(config, identity, so_far.result, key=identity.key, error=message)
        else:
            write_unfinished(config, identity, status, message, identity.key)
    except CacheError as also:
        message = f"{message}; {also}"
    if so_far.result:
        return Outcome(status, message, headline(so_far.result))
    if so_far.problem:
        message = f"{message}; {so_far.problem}"
    return Outcome(status, message, INFEASIBLE if status == "infeasible" else {})


def _name(identity: JobIdentity) -> str:
    swept = identity.sweep.swept if identity.sweep else ()
    return run_name(identity.choices, identity.overrides, swept)


def _log(config: Config, result: Result, folder: Path, log: RunLog) -> None:
    log.log(
        # Cells of MLflow's tables cut long numbers off; seven digits fit.
        metrics={name: float(f"{value:.7g}") for name, value in headline(result).items()},
        series=memory_series(result),
        tables={
            "devices": device_columns(result),
            "largest_tensors": tensor_columns(result.peaks, SHOWN_TENSORS),
            **({"batch_sweep": sweep_columns(result.batches)} if result.batches else {}),
            **_serving_sweep(result),
        },
        artifacts_dir=folder,
        left_out=STAGES_FOLDER,  # weights, which are random
        tags={"mlflow.note.content": f"{result.subject_line}  \n{_summary(config, result)}"},
    )
