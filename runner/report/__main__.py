"""``python -m runner.report``: the ranked table and the report of a sweep, from MLflow alone."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from fxpart.errors import SpecError
from runner.cli.ending import reported
from runner.report.request import ALL, Request, parsed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from runner.config.sections import TrackingConfig
    from runner.report.from_store import RunSource
    from runner.report.rows import SweepData
    from runner.tracking.tracker import LoggedRun

__all__ = ["main"]

_LISTED = 5
"""Other sweeps that are named."""


def main() -> int:
    """Run the command line; return the exit code: 0, or 2 for what the user can mend."""
    return reported(lambda: _report(parsed(sys.argv[1:])))


def _report(request: Request) -> int:
    from runner.config.sections import TrackingConfig
    from runner.output.terminal import show
    from runner.report.from_store import all_runs, chosen_sweep, sweep_from_store, sweeps_of
    from runner.report.table import show_sweep
    from runner.tracking.mlflow_runs import open_stored

    config = TrackingConfig(uri=request.uri, experiment=request.experiment)
    source = open_stored(config, Path.cwd())
    sweeps = sweeps_of(source)
    if request.sweep == ALL:
        parent = None
        data = all_runs(source, sweeps, request.experiment)
    else:
        parent = chosen_sweep(sweeps, request.sweep, request.experiment)
        if request.against is not None:
            other = chosen_sweep(sweeps, request.against, request.experiment)
            return _compare(request, source, config, other, parent)
        show(f"sweep:     {_named(parent)}")
        data = sweep_from_store(source, parent)
    written = _Written(request.output / "report.html", data)
    show_sweep(data, request.rows, f"--rows {len(data.rows)}")
    written.write()
    if parent is not None:
        written.log(config, parent)
        _list_others([sweep for sweep in sweeps if sweep is not parent])
    return 0


def _compare(
    request: Request,
    source: "RunSource",
    config: "TrackingConfig",
    before: "LoggedRun",
    after: "LoggedRun",
) -> int:
    from runner.output.terminal import show
    from runner.report.compare import compared
    from runner.report.compare_html import comparison_html
    from runner.report.compare_table import show_comparison
    from runner.report.from_store import sweep_from_store, sweep_keys

    if before is after:
        raise SpecError(
            f"sweep {after.run_id[:8]} is compared with itself; give another to --against"
        )
    ids = after.run_id[:8], before.run_id[:8]
    show(f"after:     {_named(after)} ({ids[0]})", f"before:    {_named(before)} ({ids[1]})")
    # What one of them swept, the other's jobs have a value of too.
    keys = sweep_keys(source, (before, after))
    found = compared(*(sweep_from_store(source, one, keys) for one in (before, after)))
    show_comparison(found, request.rows)
    path = request.output / f"{ids[0]}_against_{ids[1]}.html"
    section = comparison_html(found, f"{_named(before)} ({ids[1]})")
    written = _Written(path, found.after, section)
    written.write()
    written.log(config, after)
    return 0


@dataclass(frozen=True, slots=True)
class _Written:
    """A report: a file here, and one in the store."""

    path: Path
    data: "SweepData"
    first: str = ""
    """A section to begin with."""

    def write(self) -> None:
        from runner.config.paths import shown_path
        from runner.output.terminal import show
        from runner.report.written import write_report

        write_report(self.path, self.data, first=self.first)
        show(f"report:    {shown_path(self.path)}")

    def log(self, config: "TrackingConfig", parent: "LoggedRun") -> None:
        """Add it to the sweep's run, and say where runs are compared, if the store takes it."""
        from runner.report.written import kept_copy

        with kept_copy(self.path, self.data, first=self.first) as copy:
            _log(config, parent, copy)


def _log(config: "TrackingConfig", parent: "LoggedRun", path: Path) -> None:
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
    from datetime import UTC, datetime

    started = datetime.fromtimestamp(sweep.start_ms / 1e3, UTC)
    under_way = ", under way" if sweep.status == "RUNNING" else ""
    return f"{sweep.name}, started {started:%Y-%m-%d %H:%M} UTC{under_way}"


if __name__ == "__main__":
    sys.exit(main())
