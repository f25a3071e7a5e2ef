"""Jobs on a Ray cluster: an existing one, or one started here for the sweep."""

import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fxpart.errors import SpecError, one_line
from runner.sweep.launchers.ray_address import LOCAL, address_of, check_address
from runner.sweep.launchers.tickets import (
    LostJobError,
    Ticket,
    Work,
    failed,
    needs,
    python_path,
    run_ticket,
)
from runner.sweep.launchers.worker import GRACE_S

if TYPE_CHECKING:
    from hydra.core.utils import JobReturn
    from ray import ObjectRef

__all__ = ["connect", "lacking", "over_ray"]


# Checks that a machine has room for a job: otherwise Ray waits forever without a message.

_NAMES = {"num_cpus": "CPU", "num_gpus": "GPU", "memory": "memory"}
"""Options of a task, with the machine resources they use."""


def lacking(remote: Mapping[str, Any], machines: Sequence[Mapping[str, Any]]) -> str | None:
    """Return the resources of a job that no machine has, such as ``num_cpus=4``; None if one has.

    `remote` are the options of its task, `machines` the result of ``ray.nodes``. Resources in use
    count as available.
    """
    options = {name: remote.get(name) for name in _NAMES}
    amounts: dict[str, Any] = {**options, **(remote.get("resources") or {})}
    requested: dict[str, float] = {name: amount for name, amount in amounts.items() if amount}
    alive = [machine["Resources"] for machine in machines if machine["Alive"]]
    # A cluster may not list its machines yet.
    if not alive or any(_fits(requested, machine) for machine in alive):
        return None
    unmet = {
        name: n for name, n in requested.items() if not any(_fits({name: n}, m) for m in alive)
    }
    return ", ".join(f"{name}={amount:g}" for name, amount in (unmet or requested).items())


def _fits(resources: Mapping[str, float], machine: Mapping[str, float]) -> bool:
    return all(machine.get(_NAMES.get(name, name), 0) >= n for name, n in resources.items())


_ALWAYS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    # Avoids a warning that Ray will one day not hide GPUs from tasks without any.
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    # Otherwise a cluster started here begins with an idle worker for each core, none of which can
    # run a job, since jobs have an environment of their own.
    "RAY_prestart_worker_first_driver": "0",
}
"""Set for every cluster."""
_SILENT = {"RAY_DEDUP_LOGS": "1", "RAY_DEDUP_LOGS_SKIP_REGEX": "."}
"""Suppresses Ray's messages about dead processes, which the sweep reports itself."""
_LOUD = {"RAY_DEDUP_LOGS": "0"}
"""Keeps similar lines of jobs, which Ray would drop."""
_AS_GUEST = {"RAY_AUTH_MODE": "token"}
"""Clusters require a token by default, but Ray's client does not send one by default."""
_HANDED_OUT = 256
"""Most jobs submitted to Ray at once: enough for a cluster that scales with its queue."""


def over_ray(
    work: Work,
    tickets: Sequence[Ticket],
    init: Mapping[str, Any],
    remote: Mapping[str, Any],
    say: Callable[[str], None],
) -> Iterator[tuple[int, "JobReturn"]]:
    """Yield the index and result of each job as it ends.

    `init` are arguments of ``ray.init``, `remote` the options of a job's task; `say` is called with
    the reason why jobs wait. A cluster started here is reused for further jobs and ends with this
    process. In turn, Ray may end this process when a process of the cluster is killed.

    Raises:
        SpecError: if the cluster does not answer or can never run a job, an option is unknown to
            Ray, or Ray is not installed.

    """
    address = connect(init)
    import ray

    try:
        task = ray.remote(**remote)(run_ticket)
    except (TypeError, ValueError) as error:
        raise SpecError(f"hydra.launcher.remote: {one_line(error)}") from error
    _check_room(address, remote, say)
    shared = ray.put(work)
    remaining = list(reversed(tickets))
    running: dict[Any, Ticket] = {}
    try:
        while remaining or running:
            while remaining and len(running) < _HANDED_OUT:
                ticket = remaining.pop()
                running[task.remote(shared, ticket)] = ticket
            for reference in ray.wait(list(running), num_returns=1)[0]:
                ticket = running.pop(reference)
                yield ticket.index, _end(reference, ticket)
    except BaseException:
        _stop(list(running))
        raise


def connect(init: Mapping[str, Any]) -> str:
    """Connect this process to a cluster, once, and return the address.

    Raises:
        SpecError: if the cluster does not answer, or Ray is not installed.

    """
    address = address_of(init)
    _set_environment(address, init)
    with needs("ray", "ray", "ray"):
        import ray
    if not ray.is_initialized():
        _connect(address, init)
    return address


def _set_environment(address: str, init: Mapping[str, Any]) -> None:
    """Set the variables that Ray reads on import, keeping those set by the user."""
    variables = {**_ALWAYS, **(_LOUD if init.get("log_to_driver") else _SILENT)}
    if address != LOCAL:
        variables.update(_AS_GUEST if _has_token() else {})
    os.environ.update({name: os.environ.get(name, text) for name, text in variables.items()})


def _has_token() -> bool:
    """Return whether there is a token for a cluster."""
    named = any(os.environ.get(name) for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"))
    return named or (Path.home() / ".ray" / "auth_token").is_file()


def _connect(address: str, init: Mapping[str, Any]) -> None:
    import ray

    settings = {name: v for name, v in init.items() if v is not None and name != "address"}
    check_address(address)
    environment = dict(settings.pop("runtime_env", {}))
    paths = {"PYTHONPATH": python_path()}
    environment["env_vars"] = {**paths, **environment.get("env_vars", {})}
    if address != LOCAL:
        for name in ("num_cpus", "num_gpus", "include_dashboard"):
            settings.pop(name, None)  # an existing cluster has its own
    handler = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(address=address, runtime_env=environment, **settings)
    except (ConnectionError, RuntimeError, TypeError, ValueError, OSError) as error:
        raise SpecError(
            f"no Ray cluster at {address}: {one_line(error)}; start one with `ray start --head`"
            " (RAY_AUTH_TOKEN is its token), or leave hydra.launcher.init.address out to have one"
            " started here"
        ) from error
    finally:
        # Ray's own handler treats SIGTERM as a crash and leaves processes behind.
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)


def _check_room(address: str, remote: Mapping[str, Any], say: Callable[[str], None]) -> None:
    """Raise `SpecError` if a cluster started here never has room for the jobs.

    Another cluster may grow, so only print that the jobs wait.
    """
    import ray

    machines: Sequence[Mapping[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    lacks = lacking(remote, machines)
    if lacks and address == LOCAL:
        raise SpecError(
            f"hydra.launcher.remote asks for {lacks}, which the Ray cluster started here does not"
            " have; no job could start; ask for less"
        )
    if lacks:
        say(
            f"no machine of the Ray cluster at {address} has {lacks}, which"
            " hydra.launcher.remote asks for; the jobs wait until one has"
        )


def _end(reference: "ObjectRef[JobReturn]", ticket: Ticket) -> "JobReturn":
    import ray

    try:
        return ray.get(reference)
    except ray.exceptions.RayTaskError as error:  # raised in the task itself
        return failed(ticket, LostJobError(one_line(error)))
    except Exception as error:
        return failed(ticket, LostJobError(f"its process was killed ({type(error).__name__})"))


def _stop(running: list[Any]) -> None:
    """Interrupt the jobs, give them time to log it, kill the rest, and disconnect."""
    import ray

    for force in (False, True):
        for task in running:
            ray.cancel(task, force=force)
        if running:
            running = ray.wait(running, num_returns=len(running), timeout=GRACE_S)[1]
    ray.shutdown()
