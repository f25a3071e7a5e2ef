"""Jobs on a Slurm cluster through submitit, or in local processes to try it out."""

import io
import logging
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fxpart.errors import SpecError, one_line
from fxpart.support.host import available_cores
from fxpart.support.signals import held_back
from runner.sweep.launchers.tickets import (
    LostJobError,
    Ticket,
    Work,
    failed,
    needs,
    python_path,
    run_ticket,
)
from runner.sweep.launchers.worker import (
    GRACE_S,
    environment,
    interruptible,
    thread_counts,
    work_until_it_ends,
)

if TYPE_CHECKING:
    from hydra.core.utils import JobReturn
    from submitit import Executor

__all__ = ["deal", "over_local", "over_slurm", "refuse_without_slurm"]

_LOOK_S = 0.25
_ASK_S = 5.0
"""Time between two calls of ``squeue``."""
_TIME_UP = signal.SIGUSR2
"""The signal sent 90 seconds before the time limit, by Slurm or by submitit itself."""
_SBATCH = "sbatch: error: "
_OWN = ("submitit_folder", "jobs_per_process", "array_parallelism", "max_num_timeout")


@dataclass(frozen=True, eq=False, slots=True)
class _Started:
    """A submitit process and the jobs that it runs in sequence."""

    job: Any
    tickets: tuple[Ticket, ...]


def deal(
    tickets: Sequence[Ticket], processes: int, per_process: int | None
) -> list[tuple[Ticket, ...]]:
    """Return the jobs of each process: at most `per_process`, or enough to need only `processes`.

    Jobs are dealt round-robin, since neighbours in a sweep take about as long.
    """
    size = per_process or -(-len(tickets) // processes)
    count = -(-len(tickets) // size)
    return [tuple(tickets[first::count]) for first in range(count)]


def run_bundle(work: Work, tickets: Sequence[Ticket]) -> list[tuple[int, "JobReturn"]]:
    """Run the jobs in this process; return the index and result of each."""
    with interruptible(), _says_when_time_is_up():
        return [(ticket.index, run_ticket(work, ticket)) for ticket in tickets]


@contextmanager
def _says_when_time_is_up() -> Iterator[None]:
    """Turn the signal for the time limit into an error of the running job, once.

    Submitit's own error is about checkpoints, which mean nothing to our users.
    """

    def hear(number: int, _frame: object) -> None:
        signal.signal(number, signal.SIG_IGN)
        raise SpecError(
            "its process reached the limit of hydra.launcher.timeout_min; raise it, or lower "
            "hydra.launcher.jobs_per_process"
        )

    previous = signal.signal(_TIME_UP, hear)
    try:
        yield
    finally:
        signal.signal(_TIME_UP, previous)


def run_local_bundle(work: Work, tickets: Sequence[Ticket]) -> list[tuple[int, "JobReturn"]]:
    """Run the jobs like `run_bundle`, and end this process if the sweep ends."""
    work_until_it_ends(work.leader, work.host)
    return run_bundle(work, tickets)


def over_local(
    work: Work, tickets: Sequence[Ticket], settings: Mapping[str, Any]
) -> Iterator[tuple[int, "JobReturn"]]:
    """Yield the index and result of each job as its process ends; a few run at a time.

    Raises:
        SpecError: if a setting is unknown to submitit, or submitit is not installed.

    """
    cores = available_cores()
    at_once = settings["array_parallelism"] or cores
    executor = _executor("local", settings)
    remaining = list(reversed(deal(tickets, at_once, settings["jobs_per_process"])))
    running: list[_Started] = []
    variables = {"PYTHONPATH": python_path(), **thread_counts(cores, at_once)}
    try:
        while remaining or running:
            while remaining and len(running) < at_once:
                bundle = remaining.pop()
                # submitit's controller must not get Ctrl-C: it would kill the jobs.
                with held_back(signal.SIGINT), environment(variables):
                    running.append(
                        _Started(executor.submit(run_local_bundle, work, bundle), bundle)
                    )
            time.sleep(_LOOK_S)  # submitit has to be polled
            for started in [started for started in running if started.job.done()]:
                running.remove(started)
                yield from _ends(started)
    except BaseException:
        _stop_local(running)
        raise


def over_slurm(
    work: Work, tickets: Sequence[Ticket], settings: Mapping[str, Any]
) -> Iterator[tuple[int, "JobReturn"]]:
    """Yield the index and result of each job as the processes of one job array end.

    Raises:
        SpecError: if submitit or Slurm is missing, or ``sbatch`` rejects the jobs.

    """
    executor = _executor("slurm", settings)
    bundles = deal(tickets, settings["array_parallelism"], settings["jobs_per_process"])
    variables = {"PYTHONPATH": python_path(), **thread_counts(settings["cpus_per_task"] or 1, 1)}
    with environment(variables):
        try:
            # The error contains sbatch's output.
            with redirect_stderr(io.StringIO()), executor.batch():
                submitted = [executor.submit(run_bundle, work, bundle) for bundle in bundles]
        except (RuntimeError, OSError, subprocess.SubprocessError) as error:
            raise SpecError(f"Slurm did not take the jobs: {_said(error)}") from error
    running = [_Started(job, b) for job, b in zip(submitted, bundles, strict=True)]
    asked_s = time.monotonic()
    try:
        while running:
            time.sleep(_LOOK_S)  # submitit has to be polled
            ended = [started for started in running if started.job.paths.result_pickle.exists()]
            if not ended and time.monotonic() - asked_s > _ASK_S:
                asked_s = time.monotonic()
                queued = _in_queue([started.job.job_id for started in running])
                ended = [started for started in running if started.job.job_id not in queued]
            for started in ended:
                running.remove(started)
                yield from _ends(started)
    except BaseException:
        _cancel([started.job.job_id for started in running])
        raise


def _executor(cluster: str, settings: Mapping[str, Any]) -> "Executor":
    with needs(f"submitit_{cluster}", "submitit", "parallel"):
        import submitit
    logging.getLogger("submitit").setLevel(logging.ERROR)
    common = ("timeout_min", "nodes", "tasks_per_node", "cpus_per_task", "mem_gb", "name")
    options = {name: value for name, value in settings.items() if name not in _OWN}
    parameters = {
        name if name in (*common, "gpus_per_node", "stderr_to_stdout") else f"{cluster}_{name}": v
        for name, v in options.items()
        if v is not None
    }
    if cluster == "slurm":
        parameters["slurm_array_parallelism"] = settings["array_parallelism"]
    try:
        executor: Executor = submitit.AutoExecutor(folder=_private(settings), cluster=cluster)
    except RuntimeError as error:
        raise SpecError(
            f"there is no Slurm here ({one_line(error)}); start the sweep on a machine of the"
            " cluster, or try it with hydra/launcher=submitit_local"
        ) from error
    try:
        executor.update_parameters(**parameters)
    except (NameError, TypeError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        raise SpecError(f"hydra.launcher: {reason}") from error
    return executor


def _private(settings: Mapping[str, Any]) -> str:
    """Create submitit's folder, up to the part with a job's id, readable only by the user.

    Files in it contain the tracking URI, which may hold a password.
    """
    folder = str(settings["submitit_folder"])
    Path(folder.partition("%")[0]).mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder


def _ends(started: _Started) -> Iterator[tuple[int, "JobReturn"]]:
    """Yield the index and result of each job of a process that has ended."""
    if started.job.paths.result_pickle.exists():
        try:
            yield from started.job.result()
            return
        except Exception as error:
            lost = LostJobError(_said(error))
    else:
        lost = LostJobError(f"its process was killed; its output is in {started.job.paths.stderr}")
    for ticket in started.tickets:
        yield ticket.index, failed(ticket, lost)


def _said(error: BaseException) -> str:
    """Return Slurm's own message, or the last line of submitit's, after its command or trace."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip(" -\n")]
    slurms = [line.removeprefix(_SBATCH) for line in lines if line.startswith(_SBATCH)]
    return "; ".join(dict.fromkeys(slurms or lines[-1:])) or one_line(error)


def _stop_local(running: Sequence[_Started]) -> None:
    """Interrupt the jobs, give them time to log it, and kill the rest."""
    for number in (signal.SIGTERM, signal.SIGKILL):  # submitit forwards SIGTERM to the jobs
        for started in running:
            with suppress(ProcessLookupError):
                os.kill(int(started.job.job_id), number)
        end_s = time.monotonic() + GRACE_S
        while time.monotonic() < end_s and not all(started.job.done() for started in running):
            time.sleep(_LOOK_S)  # the end of a job shows only in a file
        running = [started for started in running if not started.job.done()]


# Slurm's commands; unlike ``sacct``, which submitit uses, they need no accounting database.

_COMMANDS = ("sbatch", "srun", "squeue", "scancel")
_ANSWER_S = 60.0


def refuse_without_slurm() -> None:
    """Raise `SpecError` on a machine without Slurm's commands."""
    missing = [name for name in _COMMANDS if shutil.which(name) is None]
    if missing:
        raise SpecError(
            f"there is no Slurm here (no {', '.join(missing)} on PATH); start the sweep on a"
            " machine of the cluster, or try it with hydra/launcher=submitit_local"
        )


def _in_queue(job_ids: Collection[str]) -> list[str]:
    """Return the `job_ids`, such as ``17_3``, that wait or run; all if Slurm does not answer."""
    arrays = dict.fromkeys(job_id.partition("_")[0] for job_id in job_ids)
    command = ["squeue", "--noheader", "--array", "--format=%i %A_%a", f"--jobs={','.join(arrays)}"]
    try:
        completed = subprocess.run(
            command, capture_output=True, text=True, timeout=_ANSWER_S, check=False
        )
    except subprocess.TimeoutExpired:
        return list(job_ids)
    if completed.returncode and "Invalid job id" not in completed.stderr:
        return list(job_ids)  # the controller may be restarting while jobs continue
    listed = completed.stdout.split()
    return [job_id for job_id in job_ids if job_id in listed]


def _cancel(job_ids: Collection[str]) -> None:
    """Cancel the jobs, which get SIGTERM first, and wait a little until they are gone."""
    if not job_ids:
        return
    arrays = dict.fromkeys(job_id.partition("_")[0] for job_id in job_ids)
    subprocess.run(["scancel", *arrays], capture_output=True, timeout=_ANSWER_S, check=False)
    end_s = time.monotonic() + 2 * GRACE_S
    while time.monotonic() < end_s and _in_queue(job_ids):
        time.sleep(_LOOK_S)  # Slurm has to be polled
