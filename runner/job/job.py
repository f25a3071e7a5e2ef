"""One job, from config to files, terminal and tracker; every outcome is recorded, failures too."""

import sys
import traceback
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
from fxpart.support.text_files import write_text
from runner.config.paths import shown_path
from runner.config.schema import BUDGET, RECOMMEND, Config
from runner.errors import TrackingError, message_of
from runner.experiment.batch_report import batch_line
from runner.experiment.budget import within_budget
from runner.experiment.carry_out import STAGES_FOLDER
from runner.experiment.device_memory import memory_line
from runner.experiment.experiment import carried_out, plan
from runner.experiment.generation import generation_lines
from runner.experiment.headline import INFEASIBLE, device_columns, headline, memory_series
from runner.experiment.measurement import measured_lines
from runner.experiment.memory_report import peak_line, tensor_columns
from runner.experiment.mesh import replica_count
from runner.experiment.model_spec import model_spec
from runner.experiment.objective import objective_line
from runner.experiment.offload import offload_line
from runner.experiment.pipeline_schedule import schedule_line
from runner.experiment.rates import rate_line, unpriced_line
from runner.experiment.replicas import replicas_line
from runner.experiment.result import Result
from runner.experiment.runtime import host_line
from runner.experiment.serving import latent_line, unfused_line
from runner.experiment.tensor_split import split_line
from runner.experiment.whole_modules import carrier_line, tiered_line, whole_line
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
    config_key,
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
from runner.plans.chosen import recommended_plan
from runner.tracking.open_tracker import is_file, open_tracker
from runner.tracking.tracker import ALL_BUT_INPUTS, RunLog, Tracker, announce_page
from runner.tracking.tracker_process import TrackerProcess

__all__ = [
    "RESULT_FILE",
    "TRACEBACK_FILE",
    "TRACEBACK_IN",
    "Outcome",
    "is_kept",
    "keep_failure",
    "remove_unused",
    "run_job",
]


TRACEBACK_FILE = "traceback.txt"
TRACEBACK_IN = "; traceback in "
"""Between a bug's error and the path of its traceback."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of a job."""

    status: Status
    error: str | None = None
    """One line, for a job that did not finish or could not be recorded."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """As in `runner.experiment.headline`; empty for a failed job."""
    run_id: str | None = None
    """The id of its run in the tracker."""


@dataclass(slots=True)
class _Progress:
    """A job's progress, which decides what is recorded if it fails."""

    result: Result | None = None
    """The result, once its files are written."""
    log: RunLog | None = None
    unlogged: str | None = None
    """Why the tracker could not be opened."""

    @property
    def problem(self) -> str | None:
        """Why the job is not in the tracker; None if it is."""
        return self.log.problem if self.log else self.unlogged


def is_kept(identity: JobIdentity, error: Exception) -> bool:
    """Return whether `error` becomes an outcome: any user error, and in a sweep any bug.

    A bug in one job must not end the sweep; outside a sweep it is raised with its traceback.
    """
    return isinstance(error, FxpartError) or identity.sweep is not None


def run_job(config: Config, identity: JobIdentity) -> Outcome:
    """Run one experiment, write its files, print its result and log it.

    An error that `is_kept` becomes the outcome and any other is raised; both mark the run as failed
    in the tracker. A result that cannot be logged still counts, with an error. A job of a sweep
    prints nothing unless it is verbose.
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
    """Return the config chosen by `decide`, to run like any other, and its identity."""
    with nullcontext() if verbose else without_progress():
        chosen, summary = decide(config)
    refuse_changed(config, identity)
    if verbose:
        show(f"plan:      {summary}")
    inputs = inputs_key(chosen, model_spec(chosen).key())
    return chosen, replace(identity, inputs=inputs, ran_key=config_key(chosen, inputs))


def _run_tracked(
    config: Config, identity: JobIdentity, so_far: _Progress, *, verbose: bool
) -> None:
    # MLflow's imports take as long as placing a model whose graph is known.
    may_import_beside = _may_import_beside(config, identity)
    process = TrackerProcess(config.tracking, identity.root) if may_import_beside else None
    with process or nullcontext():
        _run_opened(config, identity, so_far, process, verbose=verbose)


def _run_opened(
    config: Config,
    identity: JobIdentity,
    so_far: _Progress,
    process: TrackerProcess | None,
    *,
    verbose: bool,
) -> None:
    with ExitStack() as stack:
        with _opening_run(config, identity, stack, process) as opened:
            try:
                spec = model_spec(config)
                model = spec.key()
                # In a sweep, a capture only for advice would take longer than the job.
                is_alone = identity.sweep is None
                result = plan(config, spec, may_capture=is_alone, compiles_ahead=is_alone)
                if not is_alone and any(step.is_interrupted for step in result.curve):
                    raise KeyboardInterrupt  # the best plan so far is no result of the sweep
            except InfeasibleError:  # also a result
                refuse_changed(config, identity)
                raise
            finally:
                tracker, so_far.log = opened()
        refuse_changed(config, identity)
        # Written before the plan is executed, so that it survives a failure there.
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
    config: Config, identity: JobIdentity, stack: ExitStack, process: TrackerProcess | None
) -> Iterator[Callable[[], tuple[Tracker, RunLog]]]:
    """Open the run before the block, or during it by `process`; yield a function to get it."""
    if process is not None:
        with ThreadPoolExecutor(1) as waiting:
            yield waiting.submit(_open_run, config, identity, stack, process).result
    else:
        opened = _open_run(config, identity, stack)
        yield lambda: opened


def _may_import_beside(config: Config, identity: JobIdentity) -> bool:
    """Return whether another process may open the run while the plan is computed.

    The store must be a local file: a server that does not answer is reported before planning. A
    measurement needs the machine to itself. Where MLflow is imported, opening takes no time.
    """
    if identity.sweep or "mlflow" in sys.modules:
        return False
    if not config.latency.is_computed:
        return False
    try:
        return is_file(config.tracking, identity.root)
    except FxpartError:  # raised again by the tracker
        return False


def _open_run(
    config: Config,
    identity: JobIdentity,
    stack: ExitStack,
    process: TrackerProcess | None = None,
) -> tuple[Tracker, RunLog]:
    """Open the tracker and the job's run, closed by `stack`, and store the job's input files."""
    is_single = identity.sweep is None
    if process is not None and process.is_open():
        tracker: Tracker = process
    else:
        tracker = open_tracker(config.tracking, identity.root, must_answer=is_single)
    tags = stack.enter_context(at_work_alone(tracker, identity.root)) if is_single else {}
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
    if inputs:  # logged now, so that the run has them however it ends
        log.log(artifacts_dir=identity.folder, left_out=ALL_BUT_INPUTS)
    return tracker, log


def _show_plan(config: Config, result: Result) -> None:
    """Print the table of devices, and a line on each feature that the config uses."""
    has_tensors = result.subject.workload is None
    table = device_table(
        result.evaluation, _group(result), with_memory=has_tensors, n_devices=result.n_devices
    )
    show(result.subject_line, table, _summary(config, result))
    if has_tensors:
        scope = "of one microbatch: " if result.schedule else ""
        show(f"peak:      {scope}{peak_line(result.device_peaks, result.copy_rooms)}")
    if line := objective_line(result.problem, result.evaluation, result.n_devices):
        objective = result.problem.objective  # "memory" titles the line of device memory
        title = {"throughput": "load", "memory": "objective"}.get(objective, objective)
        show(f"{f'{title}:':11}{line}")
    if result.device_memory:
        show(f"memory:    {memory_line(result.device_needs)}")
    for line in _rate_notes(config, result):
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
        tiered_line(config, result.offloaded, result.captured.graph)
        if result.offloaded
        else carrier_line(
            config, result.problem, result.assignment, result.whole, result.device_needs
        )
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


def _rate_notes(config: Config, result: Result) -> Iterator[str]:
    """Yield the source of operator times, what limits a pass, and why it has no price."""
    if result.measured_on:
        yield f"times:     of operators on {result.measured_on}, the same for every device"
    if result.times_note:
        yield f"times:     {result.times_note}"
    issue_s = result.problem.costs.issue_s.tolist()
    if any(issue_s):
        started, latency_s = len(set(issue_s) - {0.0}), result.evaluation.latency_s
        scheduled = result.schedule is not None
        if by_host := host_line(issue_s[-1], latency_s, started, microbatch=scheduled):
            yield f"host:      {by_host}"
    if line := latent_line(config, result.problem):
        yield f"latent:    {line}"
    if line := unfused_line(config, result.problem):
        yield f"attention: {line}"
    if line := unpriced_line(config):
        yield f"price:     {line}"


def _replica_lines(config: Config, result: Result) -> Iterator[str]:
    """Yield the cost of replicas, and a note if a pipeline has only one stage."""
    stages, hint = "there is one stage", "more devices"
    # Experts may be spread over the devices of a single replica.
    if result.replicas and result.replicas.parallel.n_replicas > 1:
        yield f"replicas:  {replicas_line(result.replicas, _group(result))}"
        stages, hint = "each replica is one stage", f"{hint} or a smaller data_parallel"
    if config.mode.name == "pipeline" and result.n_devices == 1:
        yield f"pipeline:  none, {stages}; give {hint}"


def _summary(config: Config, result: Result) -> str:
    return summary_line(
        result.evaluation,
        None if result.schedule or result.generation else _rate(result),
        with_gap=result.has_gap,
        group=_group(result),
        replicas=replica_count(config),
        subject=_subject(result),
        n_devices=result.n_devices,
    )


def _subject(result: Result) -> str:
    """Return what the latency refers to, unless it covers all that the command asks for."""
    if result.generation:
        return " of the last token"
    return " of one microbatch" if result.schedule else ""


def _group(result: Result) -> int:
    """Return the number of devices that each row of the table stands for."""
    return result.split.size if result.split else 1


def _show_end(result: Result, folder: Path) -> None:
    """Print the measurements and the output folder."""
    if result.measured:
        show(*measured_lines(result.measured))
    show(f"files:     {shown_path(folder)}")


def keep_failure(config: Config | None, identity: JobIdentity, error: Exception) -> Outcome:
    """Log a job that could not start as failed; in a sweep, also write its `result.json`.

    `config` is None if it is invalid; the job is then logged to the `tracking` of its identity. A
    single run leaves no folder, unless the store failed and left an unsent run there.
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
    remove_unused(identity.folder)
    message = message_of(error)
    return Outcome("failed", f"{message}; {so_far.problem}" if so_far.problem else message)


def remove_unused(folder: Path) -> None:
    """Remove the folder of a run that ended before it wrote a file."""
    with suppress(OSError):  # not empty, or missing
        folder.rmdir()


def _failed(
    config: Config | None, identity: JobIdentity, error: Exception, so_far: _Progress
) -> Outcome:
    """Return the outcome of a job that raised `error`, and write its `result.json`.

    A job with a result has finished but was not recorded: its files stay.
    """
    status: Status = "infeasible" if isinstance(error, InfeasibleError) else "failed"
    if isinstance(error, NotApplicableError) and identity.sweep:  # outside a sweep, a user error
        status = "not_applicable"
    message, folder = message_of(error), identity.folder
    try:
        if not isinstance(error, FxpartError):
            message = f"{one_line(error)}{TRACEBACK_IN}{shown_path(folder / TRACEBACK_FILE)}"
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
        # MLflow's tables truncate long numbers; seven digits fit.
        metrics={name: float(f"{value:.7g}") for name, value in headline(result).items()},
        series=memory_series(result),
        tables={
            "devices": device_columns(result),
            "largest_tensors": tensor_columns(result.peaks, SHOWN_TENSORS),
            **({"batch_sweep": sweep_columns(result.batches)} if result.batches else {}),
            **_serving_sweep(result),
        },
        artifacts_dir=folder,
        left_out=STAGES_FOLDER,  # random weights
        tags={"mlflow.note.content": f"{result.subject_line}  \n{_summary(config, result)}"},
    )
