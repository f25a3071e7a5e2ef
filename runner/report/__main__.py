"""``python -m runner.report``: the ranked table and the report of a sweep, from MLflow alone."""

import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from fxpart.errors import SpecError
from runner.parser import Parser
from runner.reporting import reported

if TYPE_CHECKING:
    from collections.abc import Sequence

    from runner.tracking import LoggedRun, TrackingConfig

__all__ = ["Request", "main", "parsed"]

_COMMAND = "python -m runner.report"
_LISTED = 5
"""Other sweeps that are named."""


@dataclass(frozen=True, slots=True)
class Request:
    """What the command line asks for."""

    experiment: str
    sweep: str
    """``latest``, ``all`` or the id of a sweep's run."""
    uri: str | None
    """Of the store; None where runs are kept if nobody says otherwise."""
    output: Path
    """Folder of the report."""
    rows: int
    """Of the table in the terminal."""


def main() -> int:
    """Run the command line; return the exit code: 0, or 2 for what the user can mend."""
    return reported(lambda: _report(parsed(sys.argv[1:])))


def parsed(arguments: "Sequence[str]") -> Request:
    """Return what `arguments` ask for. Raises `SpecError` for what means nothing here."""
    parser = Parser(
        prog=_COMMAND,
        description="Rank the jobs of a sweep and write its report, from MLflow alone. It may still"
        " be under way.",
    )
    parser.add_argument(
        "experiment",
        nargs="?",
        default="fxpart",
        help="MLflow's experiment: fxpart if left out, or a named experiment's name",
    )
    parser.add_argument(
        "--sweep",
        default="latest",
        metavar="RUN_ID|latest|all",
        help="which sweep: the newest if left out; all: all runs of the experiment as one",
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
    found = parser.parse_args(arguments)
    if found.rows < 1:
        raise SpecError(f"--rows {found.rows} shows nothing; give 1 or more")
    folder = re.sub(r"[^\w.-]+", "_", found.experiment).strip(".") or "_"
    output = Path(found.output or Path("outputs", "reports", folder))
    return Request(found.experiment, found.sweep, found.uri, output, found.rows)


def _report(request: Request) -> int:
    from runner.mlflow_reading import open_stored
    from runner.paths import shown_path
    from runner.report.choose import ALL, all_runs, chosen_sweep, sweeps_of
    from runner.report.from_store import sweep_from_store
    from runner.report.html import report_html
    from runner.report.table import show_sweep
    from runner.terminal import show
    from runner.tracking import TrackingConfig
    from runner.writing import write_text

    config = TrackingConfig(uri=request.uri, experiment=request.experiment)
    source = open_stored(config, Path.cwd())
    sweeps = sweeps_of(source)
    if request.sweep == ALL:
        parent = None
        data = all_runs(source, sweeps, request.experiment)
    else:
        parent = chosen_sweep(sweeps, request.sweep, request.experiment)
        data = sweep_from_store(source, parent)
        show(f"sweep:     {_named(parent)}")
    path = request.output / "report.html"
    write_text(path, report_html(data))
    show_sweep(data, request.rows)
    show(f"report:    {shown_path(path)}")
    if parent is not None:
        _log(config, parent, path)
        _list_others([sweep for sweep in sweeps if sweep is not parent])
    return 0


def _log(config: "TrackingConfig", parent: "LoggedRun", path: Path) -> None:
    """Add the report to the sweep's run, and say where runs are compared, if the store takes it."""
    from runner.announce import announce_page
    from runner.tracking import TrackingError, open_tracker

    try:
        tracker = open_tracker(config, Path.cwd())
        tracker.log_sweep(parent.run_id, files=[path])
        announce_page(tracker.comparison_page(parent.run_id))
    except TrackingError as error:
        sys.stderr.write(f"the report is not in MLflow: {error}\n")


def _list_others(sweeps: "Sequence[LoggedRun]") -> None:
    from runner.terminal import counted, show

    if not sweeps:
        return
    show(f"others:    {counted(len(sweeps), 'sweep')}, or --sweep all for all runs together")
    for sweep in sweeps[:_LISTED]:
        show(f"           --sweep {sweep.run_id[:8]}  {_named(sweep)}")
    if len(sweeps) > _LISTED:
        show(f"           and {len(sweeps) - _LISTED} older")


def _named(sweep: "LoggedRun") -> str:
    from datetime import UTC, datetime

    started = datetime.fromtimestamp(sweep.start_ms / 1e3, UTC)
    under_way = ", under way" if sweep.status == "RUNNING" else ""
    return f"{sweep.name}, started {started:%Y-%m-%d %H:%M} UTC{under_way}"


if __name__ == "__main__":
    sys.exit(main())
