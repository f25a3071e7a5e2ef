"""What a launcher's processes are given: the sweep once, then a ticket for each job."""

import os
import sys
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.plugins.launcher import Launcher

from fxpart.errors import FxpartError, SpecError, one_line

if TYPE_CHECKING:
    from hydra.core.utils import JobReturn
    from hydra.types import HydraContext, TaskFunction
    from omegaconf import DictConfig

__all__ = [
    "LostJobError",
    "SpreadLauncher",
    "Ticket",
    "Work",
    "failed",
    "pack",
    "python_path",
    "run_ticket",
    "why",
]


class LostJobError(FxpartError, RuntimeError):
    """A job that ended without a word: its process was killed, or could not start."""


@dataclass(frozen=True, slots=True)
class Ticket:
    """One job, as Hydra names it."""

    index: int
    overrides: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Work:
    """What all jobs of a launch have in common, ready to travel."""

    digest: str
    """Of `packed`: a process that has unpacked it once does not do so again."""
    packed: bytes
    folder: str
    """The user's working directory, in which relative paths mean something."""
    host: str
    leader: int
    """Process id of the sweep on `host`."""


_unpacked: dict[str, tuple[Any, ...]] = {}
"""In a worker: the sweep that it works for, by digest."""


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
    installed = (sys.prefix, sys.base_prefix)
    paths = [str(Path(path).resolve()) for path in sys.path]
    own = [path for path in paths if not path.startswith(installed)]
    return os.pathsep.join(dict.fromkeys(own))


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
        # This looks for plugins again, so it is done once a process and not once a job.
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

    ours = isinstance(error, FxpartError)
    kept = LostJobError(" ".join(str(error).split()) if ours else one_line(error))
    return JobReturn(overrides=list(ticket.overrides), status=JobStatus.FAILED, _return_value=kept)


def why(ends: Sequence["JobReturn"]) -> str | None:
    """Return in one line why the first of the jobs failed that did, None if none did."""
    from hydra.core.utils import JobStatus

    for end in ends:
        if end.status is not JobStatus.COMPLETED:
            return str(end._return_value)
    return None


# What our launchers share: jobs become tickets, and each gets an end, whatever happens to it.


class SpreadLauncher(Launcher):
    """A launcher that has other processes run the jobs."""

    def __init__(self, **settings: object) -> None:
        """Keep what the configuration says, in `settings`, as plain values."""
        from omegaconf import OmegaConf

        self.settings: dict[str, Any] = {
            name: OmegaConf.to_container(value, resolve=True)
            if OmegaConf.is_config(value)
            else value
            for name, value in settings.items()
        }

    def setup(
        self,
        *,
        hydra_context: "HydraContext",
        task_function: "TaskFunction",
        config: "DictConfig",
    ) -> None:
        """Keep what Hydra hands over."""
        self.hydra_context, self.task_function, self.config = hydra_context, task_function, config

    def launch(
        self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int
    ) -> list["JobReturn"]:
        """Run the jobs and return how each ended, in their order.

        A job whose process dies has failed with `LostJobError`; the others go on.

        Raises:
            FxpartError: where no job can be started at all.

        """
        # Hydra imports every launcher, for `--help` too: what one needs is imported when it runs.
        pass

        Path(str(self.config.hydra.sweep.dir)).mkdir(parents=True, exist_ok=True)
        tickets = [
            Ticket(initial_job_idx + at, tuple(overrides))
            for at, overrides in enumerate(job_overrides)
        ]
        work = pack(self.hydra_context, self.config, self.task_function)
        ends = dict(self.spread(work, tickets))
        silent = LostJobError("its process ended without a result")
        return [ends.get(one.index) or failed(one, silent) for one in tickets]

    @abstractmethod
    def spread(
        self, work: "Work", tickets: Sequence["Ticket"]
    ) -> Iterator[tuple[int, "JobReturn"]]:
        """Yield each job's number and how it ended, as they end."""
