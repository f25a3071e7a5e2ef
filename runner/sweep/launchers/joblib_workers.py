"""Jobs on the cores of this machine, in the processes of loky, joblib's pool."""

import os
import signal
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Executor, Future, wait
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from fxpart.errors import SpecError, one_line
from fxpart.support.signals import held_back
from runner.sweep.launchers.tickets import LostJobError, Ticket, Work, failed, needs, run_ticket
from runner.sweep.launchers.worker import (
    GRACE_S,
    environment,
    interruptible,
    thread_counts,
    work_until_it_ends,
)

if TYPE_CHECKING:
    from hydra.core.utils import JobReturn

__all__ = ["over_workers", "worker_count"]

_IDLE_S = 300.0
"""Time after which an idle worker ends; a sweep may submit its jobs in several batches."""


def worker_count(n_jobs: int, cores: int) -> int:
    """Return the number of processes for `n_jobs`: -1 is all cores, -2 all but one.

    Raises:
        SpecError: if no process remains.

    """
    count = n_jobs if n_jobs >= 0 else cores + 1 + n_jobs
    if count < 1:
        raise SpecError(
            f"hydra.launcher.n_jobs={n_jobs} leaves no process on {cores} cores; write the number "
            "of processes, or -1 for all cores"
        )
    return count


def over_workers(
    work: Work, tickets: Sequence[Ticket], n_jobs: int
) -> Iterator[tuple[int, "JobReturn"]]:
    """Yield the index and result of each job as it ends.

    Never more jobs are submitted than there are processes, so that a killed process loses only jobs
    that have started; the others get new processes.

    Raises:
        SpecError: if `n_jobs` leaves no process, or joblib is not installed.

    """
    with needs("joblib", "joblib", "parallel"):
        from joblib.externals.loky import cpu_count

    count = min(worker_count(n_jobs, cpu_count()), len(tickets))
    remaining = list(reversed(tickets))
    running: dict[Future[Any], Ticket] = {}
    try:
        while remaining or running:
            while remaining and len(running) < count:
                ticket = remaining.pop()
                running[_submit(count, work, ticket)] = ticket
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                ticket = running.pop(future)
                yield ticket.index, _end(future, ticket)
    except BaseException:
        _stop(count, work, running)
        raise


def _submit(count: int, work: Work, ticket: Ticket) -> "Future[Any]":
    pool = _pool(count, work)  # first: starting its helper process unblocks interrupts
    with held_back(signal.SIGINT):
        return pool.submit(_run, work, ticket)


def _pool(count: int, work: Work) -> "Executor":
    """Return the pool: the same as before, or a new one after a process died.

    Workers watch the leader from their start, since one without a job yet would stay for `_IDLE_S`.
    """
    from joblib.externals.loky import cpu_count, get_reusable_executor

    threads = thread_counts(cpu_count(), count)
    # Starts the tracker of semaphores. If an interrupt ends this process while one is removed, the
    # tracker finds it gone and would warn after our last line.
    filters = [os.environ.get("PYTHONWARNINGS", ""), "ignore:resource_tracker:UserWarning"]
    with environment({"PYTHONWARNINGS": ",".join(filter(None, filters))}):
        pool: Executor = get_reusable_executor(
            max_workers=count,
            timeout=_IDLE_S,
            env=threads,
            initializer=work_until_it_ends,
            initargs=(work.leader, work.host),
        )
    return pool


def _run(work: Work, ticket: Ticket) -> "JobReturn":
    with interruptible():
        return run_ticket(work, ticket)


def _end(future: "Future[Any]", ticket: Ticket) -> "JobReturn":
    try:
        end: JobReturn = future.result()
    except BrokenExecutor as error:
        killed = LostJobError(f"its process was killed ({type(error).__name__})")
        return failed(ticket, killed)
    except Exception as error:  # such as a pickling error
        return failed(ticket, LostJobError(one_line(error)))
    return end


def _stop(count: int, work: Work, running: "dict[Future[Any], Ticket]") -> None:
    """Interrupt the jobs, give them time to log it, and end all workers."""
    pool: Any = _pool(count, work)
    for process in list(pool._processes or {}):
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGINT)
    wait(running, timeout=GRACE_S)
    pool.shutdown(wait=True, kill_workers=True)
