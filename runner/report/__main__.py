"""``python -m runner.report``: the ranked table and the report of a sweep, only from MLflow."""

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from fxpart.errors import SpecError
from runner.cli.ending import Parser, reported
from runner.report.sweep_data import LATEST, SweepData

if TYPE_CHECKING:
    from runner.config.schema import TrackingConfig
    from runner.tracking.tracker import LoggedRun, Runs

__all__ = ["Request", "main", "parsed"]

_ALL = "all"
_LISTED = 5
"""Most other sweeps to list."""


@dataclass(frozen=True, slots=True)
class Request:
    """The parsed command line."""

    experiment: str
    sweep: str
    """``latest``, ``all`` or the id of a sweep's run."""
    against: str | None
    """The id of the run of the sweep to compare with."""
    uri: str | None
    """Tracking URI of the store; None for the default one."""
    output: Path
    """Folder of the report."""
    rows: int
    """Most rows of the table in the terminal."""


def parsed(arguments: Sequence[str]) -> Request:
    """Parse the command line. Raises `SpecError` for invalid or conflicting arguments."""
    options = _parser().parse_args(arguments)
    if options.rows < 1:
        raise SpecError(f"--rows {options.rows} shows nothing; give 1 or more")
    sweep, against = _sweeps(options.sweep or [], options.against or [])
    folder = re.sub(r"[^\w.-]+", "_", options.experiment).strip(".") or "_"
    folder_path = Path(options.output or Path("outputs", "reports", folder))
    return Request(options.experiment, sweep, against, options.uri, folder_path, options.rows)


def _parser() -> Parser:
    parser = Parser(
        prog="python -m runner.report",
        description=(
            "Rank the jobs of a sweep and write its report, from MLflow alone. It may still be "
            "running."
        ),
    )
    parser.add_argument(
        "experiment",
        nargs="?",
        default="fxpart",
        help="MLflow's experiment: fxpart if left out, or a named experiment's name",
    )
    parser.add_argument(
        "--sweep",
        action="append",
        metavar="RUN_ID|latest|all",
        help="which sweep: the newest if left out; all: all runs of the experiment as one",
    )
    parser.add_argument(
        "--against",
        action="append",
        metavar="RUN_ID",
        help="compare it job by job with an earlier sweep: its id, or 8 characters of it",
    )
    parser.add_argument(
        "--uri",
        help="MLflow's store; if left out $MLFLOW_TRACKING_URI, or else outputs/mlflow.db",
    )
    parser.add_argument(
        "--output", metavar="FOLDER", help="of report.html: outputs/reports/EXPERIMENT if left out"
    )
    parser.add_argument(
        "--rows", type=int, default=20, help="of the table here, 20 if left out; the report has all"
    )
    return parser


def _sweeps(sweeps: list[str], against: list[str]) -> tuple[str, str | None]:
    """Return the requested sweep and the one to compare it with, if any."""
    if len(sweeps) > 1:
        raise SpecError(
            f"--sweep {' and --sweep '.join(sweeps)}: a report covers one sweep; to compare two, "
            f"use --sweep {sweeps[-1]} --against {sweeps[0]}"
        )
    if len(against) > 1:
        raise SpecError(
            f"--against {' and --against '.join(against)}: a sweep is compared with one other; "
            "give one"
        )
    sweep = sweeps[0] if sweeps else LATEST
    if against and _ALL in (sweep, *against):
        raise SpecError("two sweeps are compared, not all; give an id to --sweep and to --against")
    return sweep, against[0] if against else None


def main() -> int:
    """Run the command line and return the exit code: 0, or 2 for a user error."""
    return reported(lambda: _report(parsed(sys.argv[1:])))


def _report(request: Request) -> int:
    from runner.config.schema import TrackingConfig
    from runner.output.terminal import show
    from runner.report.from_store import all_runs, chosen_sweep, sweep_from_store, sweeps_of
    from runner.report.table import show_sweep
    from runner.tracking.mlflow_runs import open_stored

    config = TrackingConfig(uri=request.uri, experiment=request.experiment)
    source = open_stored(config, Path.cwd())
    sweeps = sweeps_of(source)
    if request.sweep == _ALL:
        parent = None
        data = all_runs(source, sweeps, request.experiment)
    else:
        parent = chosen_sweep(sweeps, request.sweep, request.experiment)
        if request.against is not None:
            other = chosen_sweep(sweeps, request.against, request.experiment)
            _compare(request, source, config, other, parent)
            return 0
        show(f"sweep:     {_named(parent)}")
        data = sweep_from_store(source, parent)
    show_sweep(data, request.rows, f"--rows {len(data.rows)}")
    _write(request.output / "report.html", data, config, parent)
    if parent is not None:
        _list_others([sweep for sweep in sweeps if sweep is not parent])
    return 0


def _compare(
    request: Request,
    source: "Runs",
    config: "TrackingConfig",
    before: "LoggedRun",
    after: "LoggedRun",
) -> None:
    from runner.output.terminal import show
    from runner.report.compare import compared
    from runner.report.from_store import sweep_from_store, sweep_keys
    from runner.report.html import comparison_html
    from runner.report.table import show_comparison

    if before is after:
        raise SpecError(
            f"sweep {after.run_id[:8]} is compared with itself; give another to --against"
        )
    short_ids = after.run_id[:8], before.run_id[:8]
    show(
        f"after:     {_named(after)} ({short_ids[0]})",
        f"before:    {_named(before)} ({short_ids[1]})",
    )
    # Keys swept in one of them have a value in the other's jobs too.
    keys = sweep_keys(source, (before, after))
    comparison = compared(*(sweep_from_store(source, run, keys) for run in (before, after)))
    show_comparison(comparison, request.rows)
    path = request.output / f"{short_ids[0]}_against_{short_ids[1]}.html"
    section = comparison_html(comparison, f"{_named(before)} ({short_ids[1]})")
    _write(path, comparison.after, config, after, section)


def _write(
    path: Path,
    data: SweepData,
    config: "TrackingConfig",
    parent: "LoggedRun | None",
    first: str = "",
) -> None:
    """Write the report, starting with the section `first`, to `path` and to the sweep's run."""
    from runner.config.paths import shown_path
    from runner.output.terminal import show
    from runner.report.html import kept_copy, write_report

    write_report(path, data, first=first)
    show(f"report:    {shown_path(path)}")
    if parent is not None:
        with kept_copy(path, data, first=first) as copy:
            _log(config, parent, copy)


def _log(config: "TrackingConfig", parent: "LoggedRun", path: Path) -> None:
    """Log the file to the sweep's run and print the comparison page, unless the store fails."""
    from runner.errors import TrackingError
    from runner.tracking.open_tracker import open_tracker
    from runner.tracking.tracker import announce_page

    try:
        tracker = open_tracker(config, Path.cwd())
        tracker.log_sweep(parent.run_id, files=[path])
        announce_page(tracker.comparison_page(parent.run_id))
    except TrackingError as error:
        sys.stderr.write(f"the report is not in MLflow: {error}\n")


def _list_others(sweeps: "Sequence[LoggedRun]") -> None:
    from runner.output.terminal import counted, show

    if not sweeps:
        return
    show(
        f"others:    {counted(len(sweeps), 'sweep')}; --against ID compares with one, --sweep all"
        " takes all runs together"
    )
    for sweep in sweeps[:_LISTED]:
        show(f"           --sweep {sweep.run_id[:8]}  {_named(sweep)}")
    if len(sweeps) > _LISTED:
        show(f"           and {len(sweeps) - _LISTED} older")


def _named(sweep: "LoggedRun") -> str:
    started = datetime.fromtimestamp(sweep.start_ms / 1e3, UTC)
    under_way = ", under way" if sweep.status == "RUNNING" else ""
    return f"{sweep.name}, started {started:%Y-%m-%d %H:%M} UTC{under_way}"


if __name__ == "__main__":
    sys.exit(main())
