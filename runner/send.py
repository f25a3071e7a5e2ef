"""``python -m runner.send``: log the runs kept on disk while their store was unreachable."""

import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from fxpart.errors import FxpartError, SpecError
from runner.cli.ending import Parser, reported
from runner.job.locks import LOCKS_TAG, Locks, sweep_lock

if TYPE_CHECKING:
    from collections.abc import Sequence

    from runner.tracking.tracker import Tracker, UnsentRun

__all__ = ["Request", "main", "parsed"]

_COMMAND = "python -m runner.send"


@dataclass(frozen=True, slots=True)
class Request:
    """The arguments of the command line."""

    folder: Path
    """The folder to search for unsent runs, recursively."""
    uri: str | None
    """The target store; None for the default one, and then only for runs meant for it."""


def main() -> int:
    """Run the command line and return the exit code: 0, or 2 if a run is still unsent."""
    return reported(lambda: _send(parsed(sys.argv[1:])))


def parsed(arguments: "Sequence[str]") -> Request:
    """Parse the command line. Raises `SpecError` for unknown arguments or a missing folder."""
    parser = Parser(
        prog=_COMMAND,
        description=(
            "Log the runs that could not be logged when they ended: each has left a file "
            "unsent.json in its folder, which is removed when the run is in the store. Each run "
            "is logged once, however often this is repeated or interrupted."
        ),
    )
    parser.add_argument(
        "folder",
        nargs="?",
        type=Path,
        default=Path("outputs"),
        help="folder to search, with its subfolders (outputs)",
    )
    parser.add_argument(
        "--uri",
        help="tracking.uri of the store that they go to, with its password if it has one"
        " ($MLFLOW_TRACKING_URI, or else outputs/mlflow.db; runs meant for another store stay)",
    )
    options = parser.parse_args(arguments)
    if not options.folder.is_dir():
        raise SpecError(
            f"there is no folder {options.folder}; give {_COMMAND} the one with the runs"
        )
    return Request(options.folder, options.uri)


def _send(request: Request) -> int:
    from runner.errors import TrackingError
    from runner.output.countdown import Countdown
    from runner.output.terminal import counted, show
    from runner.tracking.unsent import send_file, unsent_files

    trackers = _Trackers(request.uri)
    paths = unsent_files(request.folder)
    sent = n_failed = 0
    problems: dict[str, None] = {}
    countdown = Countdown("runs", len(paths))

    def tally() -> str:
        failed = f" ({n_failed} could not be)" if n_failed else ""
        return f"{sent} of {counted(len(paths), 'run')} sent{failed}"

    countdown.start()
    try:
        for path in paths:
            try:
                sent += send_file(path, trackers.of)
            except FxpartError as error:
                n_failed += 1
                problems[str(error)] = None
            countdown.add(tally)
    finally:
        countdown.stop()
    trackers.close_sweeps()
    show(f"sent {counted(sent, 'run')}" if paths else f"no unsent runs below {request.folder}")
    if problems:
        first_problem = next(iter(problems))
        raise TrackingError(f"{counted(n_failed, 'run')} could not be sent: {first_problem}")
    return 0


class _Trackers:
    """Trackers by store and experiment, each opened once, even if opening fails."""

    def __init__(self, uri: str | None) -> None:
        self._uri = uri
        self._opened: dict[tuple[str, str], Tracker | FxpartError] = {}
        self._parents: dict[str, tuple[Tracker, str | None]] = {}
        """By sweep: its tracker, and the name of the locks that show whether it is running."""

    def of(self, run: "UnsentRun") -> "Tracker":
        """Return the tracker for `run`.

        Raises:
            SpecError: if the run is meant for another store than the default one.
            TrackingError: if the store cannot be opened.

        """
        from runner.config.passwords import without_password
        from runner.config.schema import TrackingConfig
        from runner.tracking.mlflow_store import store_uri
        from runner.tracking.open_tracker import open_tracker

        uri = self._uri or store_uri(TrackingConfig(), Path.cwd())
        # The file may come from somebody else: it must not choose where a run, and a password, go.
        if self._uri is None and run.uri != without_password(uri):
            raise SpecError(
                f"run {run.name} is meant for {run.uri}, not for {without_password(uri)};"
                f" add --uri {run.uri} to send it there"
            )
        place = (uri, run.experiment)
        if place not in self._opened:
            try:
                config = TrackingConfig(uri=place[0], experiment=place[1])
                self._opened[place] = open_tracker(config, Path.cwd())
            except FxpartError as error:
                self._opened[place] = error
        tracker = self._opened[place]
        if isinstance(tracker, FxpartError):
            raise tracker
        parent = run.tags.get("mlflow.parentRunId")
        if parent:
            self._parents[parent] = (tracker, run.tags.get(LOCKS_TAG))
        return tracker

    def close_sweeps(self) -> None:
        """End the RUNNING sweeps of the runs sent that no process leads any more.

        Only the locks of sweeps started in this folder can be checked.
        """
        for parent, (tracker, locks_name) in self._parents.items():
            with suppress(FxpartError):  # the runs are sent either way
                locks = Locks(Path.cwd())
                sweep = tracker.run(parent)
                key = sweep_lock(sweep.tags.get("sweep_key", ""))
                is_idle = locks.name == locks_name and not locks.is_held_elsewhere(key)
                if sweep.status == "RUNNING" and is_idle:
                    tracker.finish_sweep(parent)


if __name__ == "__main__":
    sys.exit(main())
