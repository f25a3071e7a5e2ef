"""Common parts of all launchers: jobs as tickets, their results, and required extras.

A process gets the pickled sweep once, and then a ticket for each job.
"""

import os
import sys
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fxpart.errors import FxpartError, SpecError, one_line
from runner.errors import message_of

if TYPE_CHECKING:
    from hydra.core.utils import JobReturn
    from hydra.types import HydraContext
    from omegaconf import DictConfig

__all__ = [
    "LostJobError",
    "Ticket",
    "Work",
    "failed",
    "needs",
    "pack",
    "prefer_own_launchers",
    "python_path",
    "run_ticket",
    "why",
]


class LostJobError(FxpartError, RuntimeError):
    """A job without a result: its process was killed, or could not start."""


@dataclass(frozen=True, slots=True)
class Ticket:
    """One job, by Hydra's index and overrides."""

    index: int
    overrides: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Work:
    """The data shared by all jobs of a launch."""

    digest: str
    """Digest of `packed`, so that a process unpacks it only once."""
    packed: bytes
    folder: str
    """The user's working directory, for relative paths."""
    host: str
    leader: int
    """Process id of the sweep on `host`."""


_unpacked: dict[str, tuple[Any, ...]] = {}
"""In a worker: its unpickled sweep, by digest."""


def pack(
    context: "HydraContext", config: "DictConfig", task_function: Callable[[Any], Any]
) -> Work:
    """Return the data that a process needs to run any job of the sweep."""
    import socket

    import cloudpickle
    from hydra.core.singleton import Singleton

    packed = cloudpickle.dumps((context, config, task_function, Singleton.get_state()))
    digest = sha256(packed).hexdigest()
    return Work(digest, packed, str(Path.cwd()), socket.gethostname(), os.getpid())


def python_path() -> str:
    """Return a PYTHONPATH with which another process can import what this one can.

    It has the paths outside of Python's installation, such as a checkout or the user's modules.
    """
    keys = ("stdlib", "platstdlib", "purelib", "platlib")
    installed = [Path(sysconfig.get_path(key)).resolve() for key in keys]
    paths = [Path(path).resolve() for path in sys.path]
    others = [path for path in paths if not any(map(path.is_relative_to, installed))]
    return os.pathsep.join(dict.fromkeys(map(str, others)))


def run_ticket(work: Work, ticket: Ticket) -> "JobReturn":
    """Run one job in this process and return its status, without configurations.

    Hydra's own return value holds two of them per job, which the sweep would keep until its end.
    """
    from hydra.core.utils import run_job
    from omegaconf import open_dict

    try:
        context, config, task_function = _unpack(work)
        composed = context.config_loader.load_sweep_config(config, list(ticket.overrides))
        with open_dict(composed):
            composed.hydra.job.id = f"{composed.hydra.job.name}_{ticket.index}"
            composed.hydra.job.num = ticket.index
        whole = run_job(
            hydra_context=context,
            config=composed,
            task_function=task_function,
            job_dir_key="hydra.sweep.dir",
            job_subdir_key="hydra.sweep.subdir",
        )
        return _small(ticket, whole)
    except Exception as error:
        return failed(ticket, error)


def _unpack(work: Work) -> tuple[Any, Any, Any]:
    if work.digest not in _unpacked:
        import cloudpickle
        from hydra.core.singleton import Singleton
        from hydra.core.utils import setup_globals

        try:
            os.chdir(work.folder)
        except OSError as error:
            raise SpecError(
                f"{work.folder} does not exist on the machine of a job ({error.strerror}); start "
                "the sweep in a folder that all machines share"
            ) from error
        context, config, task_function, state = cloudpickle.loads(work.packed)
        setup_globals()
        # Hydra scans for plugins here: once per process, not per job.
        Singleton.set_state(state)
        _unpacked.clear()
        _unpacked[work.digest] = (context, config, task_function)
    context, config, task_function = _unpacked[work.digest]
    return context, config, task_function


def _small(ticket: Ticket, whole: "JobReturn") -> "JobReturn":
    from hydra.core.utils import JobReturn, JobStatus

    if whole.status is not JobStatus.COMPLETED:
        return failed(ticket, whole._return_value)
    return JobReturn(
        overrides=list(ticket.overrides),
        working_dir=whole.working_dir,
        task_name=whole.task_name,
        status=whole.status,
        _return_value=whole.return_value,
    )


def failed(ticket: Ticket, error: BaseException) -> "JobReturn":
    """Return the result of a job that raised `error`, as text: not all errors can be pickled."""
    from hydra.core.utils import JobReturn, JobStatus

    reason = message_of(error) if isinstance(error, FxpartError) else one_line(error)
    return JobReturn(
        overrides=list(ticket.overrides),
        status=JobStatus.FAILED,
        _return_value=LostJobError(reason),
    )


def why(ends: Sequence["JobReturn"]) -> str | None:
    """Return the error of the first failed job, in one line; None if none failed."""
    from hydra.core.utils import JobStatus

    for end in ends:
        if end.status is not JobStatus.COMPLETED:
            return str(end._return_value)
    return None


# Packages that launchers need beyond a plain installation.


@contextmanager
def needs(launcher: str, package: str, extra: str) -> Iterator[None]:
    """Context for importing `package`: a failed import becomes an error on how to install it.

    Raises:
        SpecError: if the package is not installed.

    """
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != package:
            raise
        raise SpecError(
            f"hydra/launcher={launcher} needs {package}; pip install 'fxpart[{extra}]'"
        ) from error


def prefer_own_launchers() -> None:
    """Remove launchers of other packages with the same names as ours from Hydra's store.

    Hydra would check our configuration against theirs. Call this after Hydra's scan for plugins.
    """
    from hydra.core.config_store import ConfigStore

    from runner.config.paths import conf_dir

    known = ConfigStore.instance().repo.get("hydra", {}).get("launcher", {})
    for path in (conf_dir() / "hydra" / "launcher").glob("*.yaml"):
        known.pop(path.name, None)
