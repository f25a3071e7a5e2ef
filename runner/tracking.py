"""Where runs are kept: the protocol of a tracker, and opening one.

Importing this module does not import MLflow; opening a tracker does.
"""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol
from urllib.parse import unquote, unquote_plus

from fxpart.errors import FxpartError, SpecError, nearest_names

if TYPE_CHECKING:
    from runner.unsent import UnsentRun

__all__ = [
    "Columns",
    "ComparisonPage",
    "LoggedRun",
    "RunLog",
    "RunStatus",
    "Series",
    "Tracker",
    "TrackingConfig",
    "TrackingError",
    "hide_password",
    "open_tracker",
    "password_to_fill_in",
    "without_password",
]

Series = Sequence[tuple[int, float]]
"""A metric over steps: ``(step, value)``, steps rising."""
Columns = Mapping[str, Sequence[object]]
"""A table: name of a column to its cells, all columns of one length."""
RunStatus = Literal["FINISHED", "FAILED", "KILLED"]

_NAMES = ("mlflow", "none")


_SECRET = re.compile(
    r"(?<=[?&;])([^=&?;]*(?:password|passwd|passphrase|pwd|token|secret)=)([^&]*)", re.IGNORECASE
)
"""A password in a query, such as ``sslpassword=word``."""
_LOGIN = re.compile(r"(?<=://)(?P<user>[^:/?#]*)(?::(?P<word>.*))?@(?=[^@]*$)", re.DOTALL)
"""A user and a password, up to the last @: one that is not quoted may have any of / # ? @ in it."""


def without_password(uri: str) -> str:
    """Return a tracking URI as it may be shown and kept: without the password and the user.

    Of an address that can be read in two ways, rather too much is left out than a part of a
    password left in.
    """
    shown = _SECRET.sub(r"\1***", uri)
    login = _LOGIN.search(shown)
    if login is None:
        return shown
    return shown[: login.start()] + shown[login.end() :]


def password_to_fill_in(uri: str) -> str:
    """Return a tracking URI for a command that a person types: PASSWORD stands where it goes."""
    shown = _SECRET.sub(r"\1PASSWORD", uri)
    login = _LOGIN.search(shown)
    if login is None or not login["word"]:
        return shown
    return f"{shown[: login.start('word')]}PASSWORD{shown[login.end('word') :]}"


def hide_password(text: str, uri: str) -> str:
    """Return `text`, such as a store's own message, without the passwords of `uri`."""
    login = _LOGIN.search(_SECRET.sub(r"\1***", uri))
    words = [match[2] for match in _SECRET.finditer(uri)]
    if login and login["word"]:
        # Whoever takes the address apart finds a host or a port in it, and says so.
        parts = re.split(r"[/:#?@]", login["word"])
        words += [login["word"], *(part for part in parts if len(part) > 2)]
    # As it was given, and as it is read; the longest first.
    spelled = {one for word in words if word for one in (word, unquote(word), unquote_plus(word))}
    for word in sorted(spelled, key=lambda one: (-len(one), one)):
        text = text.replace(word, "***")
    return text


class TrackingError(FxpartError, RuntimeError):
    """A store of runs that cannot be reached, read or written."""


@dataclass  # not frozen: OmegaConf would refuse overrides of it
class TrackingConfig:
    """Which tracker to use, and where it keeps runs."""

    name: str = "mlflow"
    """``mlflow`` or ``none``."""
    uri: str | None = None
    """Tracking URI of MLflow. None: the environment's ``MLFLOW_TRACKING_URI``, or else the sqlite
    file ``outputs/mlflow.db`` below the root."""
    experiment: str = "fxpart"


@dataclass(frozen=True, slots=True)
class ComparisonPage:
    """Where runs are compared, and what to start first."""

    url: str
    """Opens the table of runs."""
    charts_url: str
    """Opens the same runs as charts."""
    command: str | None
    """Serves the page from a store that is a file; None when a server is already there."""


@dataclass(frozen=True, eq=False, slots=True)
class LoggedRun:
    """A run as the store has it. Of a metric over steps, `metrics` has the last value."""

    run_id: str
    name: str
    status: str
    """``RUNNING``, ``FINISHED``, ``FAILED`` or ``KILLED``."""
    params: Mapping[str, str]
    metrics: Mapping[str, float]
    tags: Mapping[str, str]
    start_ms: int
    """Since 1970, as is the end."""
    end_ms: int | None

    @property
    def sweeps(self) -> tuple[str, ...]:
        """The ids of the sweeps that the run belongs to."""
        return tuple(self.tags.get("sweeps", "").split())


class RunLog(Protocol):
    """One run that is under way."""

    @property
    def run_id(self) -> str | None:
        """The store's name for the run; None when nothing is kept, or the store is gone."""

    @property
    def unsent(self) -> Path | None:
        """The file that keeps the run until the store is back; known when the run is closed."""

    @property
    def problem(self) -> str | None:
        """Why the run is in that file, and how it is sent, in one line; None when it was sent."""

    def log(
        self,
        *,
        metrics: Mapping[str, float] | None = None,
        series: Mapping[str, Series] | None = None,
        tables: Mapping[str, Columns] | None = None,
        artifacts_dir: Path | None = None,
        left_out: str | None = None,
        tags: Mapping[str, str] | None = None,
    ) -> None:
        """Keep what the run found; values that are not finite are left out.

        It goes to the store when the run is closed, in one piece. Of `artifacts_dir` the folder
        named `left_out` is not kept, or with `runner.input_files.ALL_BUT_INPUTS` anything but that
        of inputs. A long series is thinned to the maximum of each stretch.
        """


class Tracker(Protocol):
    """Keeps runs. All methods raise `TrackingError` when the store fails."""

    @property
    def place(self) -> tuple[str, str]:
        """The store, without its password, and the experiment."""

    def start(
        self,
        run_name: str,
        params: Mapping[str, object],
        tags: Mapping[str, str] | None = None,
        parent_run_id: str | None = None,
        folder: Path | None = None,
    ) -> AbstractContextManager[RunLog]:
        """Return a context in which the run is open, with tag ``outcome`` in the end.

        An exception marks the run FAILED (an interrupt: KILLED) with the tag ``error``, and goes
        on; so that a comparison shows it, an error also logs ``feasible`` 0.

        With a `folder`, a store that fails raises nothing: the run is kept there, and
        `RunLog.problem` says so once the run is closed.
        """

    def start_sweep(self, name: str, tags: Mapping[str, str] | None = None) -> str | None:
        """Open a run that others name as their parent, and return its id."""

    def reopen_sweep(self, run_id: str) -> None:
        """Mark a parent run as running again."""

    def log_sweep(
        self,
        parent_run_id: str | None,
        *,
        metrics: Mapping[str, float] | None = None,
        tags: Mapping[str, str] | None = None,
        files: Sequence[Path] = (),
    ) -> None:
        """Add to the parent run; `files` become artifacts under their own names."""

    def finish_sweep(self, parent_run_id: str | None, status: RunStatus = "FINISHED") -> None:
        """Close the parent run."""

    def run(self, run_id: str) -> LoggedRun:
        """Return one run. Raises `SpecError` when there is none of that id."""

    def read_artifact(self, run_id: str, path: str) -> bytes | None:
        """Return what a run's file says, None when the run has no file at `path`."""

    def runs(self, tags: Mapping[str, str]) -> list[LoggedRun]:
        """Return the runs that have all these tags with these values, the oldest first."""

    def runs_of_sweep(self, sweep_id: str) -> list[LoggedRun]:
        """Return the runs that belong to a sweep, those of others too, the oldest first."""

    def settled(
        self,
        tag: str,
        values: Collection[str],
        stands: Callable[[LoggedRun], bool] = lambda _run: True,
    ) -> dict[str, LoggedRun]:
        """Return, by its value of `tag`, the newest run that is finished or infeasible.

        Of those that `stands` says still count.
        """

    def unfinished(self, tag: str, values: Collection[str]) -> list[LoggedRun]:
        """Return the runs with one of these values that came to no result, the oldest first."""

    def mark_cut_off(self, run_id: str, reason: str) -> None:
        """Mark a run whose process died: KILLED, and no longer of its sweep."""

    def supersede(self, run_id: str) -> None:
        """Take a failed run, which is done again, out of its sweep; the error stays with it."""

    def join_sweep(self, run_ids: Sequence[str], sweep_id: str) -> None:
        """Note that these runs belong to a sweep too."""

    def send(self, run: "UnsentRun", folder: Path) -> None:
        """Log a run that was kept in `folder`; what the store has of it already is completed."""

    def comparison_page(self, parent_run_id: str | None = None) -> ComparisonPage | None:
        """Prepare the page that compares one sweep's runs, or all runs, and say where it is."""


def open_tracker(config: TrackingConfig, root: Path, *, must_answer: bool = True) -> Tracker:
    """Return the tracker that `config` names, its store ready; `root` is where outputs lie.

    A process opens a store once, and gets the same tracker for it again. Where the store need not
    answer, as for a job of a sweep that is under way, it is looked for again with each run.

    Raises `SpecError` for an unknown name and `TrackingError` for a store that does not work.
    """
    if config.name == "none":
        from runner.no_tracker import NoTracker  # it knows this module

        return NoTracker()
    if config.name != "mlflow":
        near = nearest_names(config.name, _NAMES)
        raise SpecError(f"there is no tracking {config.name!r}; {near}; choose one with tracking=")
    from runner.mlflow_tracker import shared_tracker  # MLflow takes 1 to 2 s

    return shared_tracker(config, root, must_answer=must_answer)
