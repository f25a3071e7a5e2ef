"""What all launchers share: jobs as tickets, how each ended, and the extras that they need.

A process gets the sweep once, pickled, then a ticket for each job.
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
    """One job, as Hydra names it."""

    index: int
    overrides: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Work:
    """What all jobs of a launch have in common, pickled."""

    digest: str
    """Of `packed`: a process that has unpacked it once does not do so again."""
    packed: bytes
    folder: str
    """The user's working directory, from which relative paths are meant."""
    host: str
    leader: int
    """Process id of the sweep on `host`."""


_unpacked: dict[str, tuple[Any, ...]] = {}
"""In a worker: the sweep that it works for, unpickled, by digest."""


def pack(
    context: "HydraContext", config: "DictConfig", task_function: Callable[[Any], Any]
) -> Work:
    """Return what a process needs to run any job of the sweep."""
    import socket

    import cloudpickle
    from hydra.core.singleton import Singleton

    packed = cloudpickle.dumps((context, config, task_function, Singleton.get_state()))
    digest = sha256(packed).hexdigest()
    return Work(digest, packed, str(Path.cwd()), socket.gethostname(), os.getpid())


def python_path() -> str:
    """Return a PYTHONPATH by which another process finds what this one imports.

    What is installed with Python itself is there anyway; a checkout and the user's own modules are
    not.
    """
    keys = ("stdlib", "platstdlib", "purelib", "platlib")
    installed = [Path(sysconfig.get_path(key)).resolve() for key in keys]
    paths = [Path(path).resolve() for path in sys.path]
    others = [path for path in paths if not any(map(path.is_relative_to, installed))]
    return os.pathsep.join(dict.fromkeys(map(str, others)))


def run_ticket(work: Work, ticket: Ticket) -> "JobReturn":
    """Run one job in this process and return its status, without the configurations.

    Hydra's own return holds two of them for each job, which the sweep would keep to its end.
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
                f"{work.folder} is not there on the machine of a job ({error.strerror}); start the"
                " sweep in a folder that all machines share"
            ) from error
        context, config, task_function, state = cloudpickle.loads(work.packed)
        setup_globals()
        # Hydra looks for plugins again here: once a process, not once a job.
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
    """Return how a job ended that raised `error`, which is kept in words: not all can travel."""
    from hydra.core.utils import JobReturn, JobStatus

    reason = message_of(error) if isinstance(error, FxpartError) else one_line(error)
    return JobReturn(
        overrides=list(ticket.overrides),
        status=JobStatus.FAILED,
        _return_value=LostJobError(reason),
    )


def why(ends: Sequence["JobReturn"]) -> str | None:
    """Return in one line why the first of the jobs failed that did, None if none did."""
    from hydra.core.utils import JobStatus

    for end in ends:
        if end.status is not JobStatus.COMPLETED:
            return str(end._return_value)
    return None


# What a launcher needs that a plain installation does not have.


@contextmanager
def needs(launcher: str, package: str, extra: str) -> Iterator[None]:
    """Import `package` in here; without it, say in one line how to install it.

    Raises:
        SpecError: when the package is not installed.

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
    """Make Hydra forget launchers of other packages that have the name of one of ours.

    Hydra would check our configuration against theirs. Call it after Hydra's look for plugins.
    """
    from hydra.core.config_store import ConfigStore

    from runner.config.paths import conf_dir

    known = ConfigStore.instance().repo.get("hydra", {}).get("launcher", {})
    for path in (conf_dir() / "hydra" / "launcher").glob("*.yaml"):
        known.pop(path.name, None)
