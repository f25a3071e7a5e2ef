"""Jobs in other processes: handed to one of Hydra's launchers, counted by the files they leave."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from fxpart.errors import FxpartError, one_line
from runner.job.job import RESULT_FILE
from runner.job.swept_job import JobEnd
from runner.sweep.launchers.work import why
from runner.sweep.one_job import end_of
from runner.sweep.snapshot import JOB_KEY, Placed, SnapshotLoader, write_placed

if TYPE_CHECKING:
    from omegaconf import DictConfig

__all__ = ["is_in_process", "run_elsewhere"]

_IN_PROCESS = "hydra._internal.core_plugins.basic_launcher.BasicLauncher"
_JOB_FILE = "job.json"
_LOOK_S = 0.5
"""Between two looks at which jobs have ended: no launcher of Hydra's tells meanwhile."""


def is_in_process(config: "DictConfig") -> bool:
    """Return whether the launcher that was chosen runs the jobs in this process."""
    return str(config.hydra.launcher.get("_target_")) == _IN_PROCESS


def run_elsewhere(
    placed: Sequence[Placed],
    task_function: Callable[[Any], Any],
    config: "DictConfig",
    ended: Callable[[str, JobEnd], None],
) -> str | None:
    """Run the jobs with the launcher that `config` names; `ended` hears of each, by its key.

    It hears of those alone that left a result. Returns in one line why the launcher broke off, None
    if it came to its end.

    Raises:
        FxpartError: for a folder that cannot be written, or a launcher that can start nothing.

    """
    from hydra._internal.callbacks import Callbacks
    from hydra.core.plugins import Plugins
    from hydra.types import HydraContext

    batch = []
    for one in placed:
        one.folder.mkdir(parents=True, exist_ok=True)
        # What an earlier attempt left is not what this one found.
        (one.folder / RESULT_FILE).unlink(missing_ok=True)
        path = one.folder / _JOB_FILE
        write_placed(path, one)
        batch.append([f"{JOB_KEY}={path}", *one.job.overrides])
    loader: Any = SnapshotLoader()
    launcher = Plugins.instance().instantiate_launcher(
        hydra_context=HydraContext(config_loader=loader, callbacks=Callbacks()),
        task_function=task_function,
        config=config,
    )
    with _watched(placed, ended):
        try:
            return why(launcher.launch(batch, initial_job_idx=0))
        except FxpartError:
            raise  # no job can be started at all
        # Whatever a pool, a cluster or its client raises when a process is killed: the results of
        # the other jobs matter more.
        except Exception as error:
            return one_line(error)


@contextmanager
def _watched(placed: Sequence[Placed], ended: Callable[[str, JobEnd], None]) -> Iterator[None]:
    """Tell `ended` of each job that leaves a result, from another thread, and at last from here."""
    left = list(placed)
    stop = threading.Event()

    def look() -> None:
        for one in list(left):
            end = end_of(one.folder, one.sweep.sweep)
            if end is not None:
                left.remove(one)
                ended(one.job.key, end)

    def watch() -> None:
        while not stop.wait(_LOOK_S):
            look()

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        stop.set()
        watcher.join()
        look()
