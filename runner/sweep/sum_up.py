"""The end of a sweep: the ranked table, the report, the comparison page, and the exit code."""

import sys
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from fxpart.errors import FxpartError
from runner.cli.ending import USER_ERROR, remember
from runner.config.paths import shown_path
from runner.errors import TrackingError
from runner.job.identity import override_values, without_elsewhere
from runner.job.job import RESULT_FILE, TRACEBACK_FILE
from runner.job.record import run_name
from runner.output.result_files import SETTLED, read_result
from runner.output.terminal import counted, show
from runner.sweep.session import Session, job_folder
from runner.tracking.tracker import announce_page
from runner.tracking.unsent import send_command

if TYPE_CHECKING:
    from runner.report.sweep_data import SweepData, SweepRow

__all__ = ["sum_up"]

REPORT_FILE = "report.html"
_SHOWN = 20
"""Most rows of the table in the terminal; the report has all."""


def sum_up(session: Session) -> None:
    """Print the ranking, write and log the report, and set the exit code.

    It is 0 if some job finished, and the others at worst do not fit or do not apply.
    """
    from runner.report.html import write_report
    from runner.report.table import show_sweep

    problems = session.parent.problems
    problems += _of_jobs(session)
    data = _data(session, problems)
    show_sweep(data, None if session.config.verbose else _SHOWN)
    show(*_lost_files(session))
    path = session.parent.folder / REPORT_FILE
    write_report(path, data)
    _record(session, path, data, problems)
    ends = session.ends.values()
    # The table has the errors of jobs; bugs are repeated here with the file of their traceback.
    bugs = [end.error for end in ends if end.error and TRACEBACK_FILE in end.error]
    for problem in dict.fromkeys([*bugs, *problems]):
        sys.stderr.write(f"error: {problem}\n")
    finished = [end for end in ends if end.status == "finished"]
    is_well = all(end.status in SETTLED for end in ends)
    unrecorded = any(end.error for end in finished)
    is_success = finished and is_well and not unrecorded and not problems
    remember(0 if is_success else USER_ERROR)


def _of_jobs(session: Session) -> list[str]:
    """Return lines on lost jobs, and on results that are only on disk."""
    problems = []
    if any(end.status == "lost" for end in session.ends.values()):
        problems.append(f"jobs were lost: {session.lost_why}; the same command runs them again")
    unsent = sum(end.status == "finished" and bool(end.error) for end in session.ends.values())
    if unsent:
        uri, folder = session.tracker.place[0], shown_path(session.parent.folder)
        problems.append(
            f"{counted(unsent, 'result')} could not be logged and stayed on disk; log them later"
            f" with {send_command(uri, session.root, folder)}, or with the same command"
        )
    return problems


def _data(session: Session, problems: list[str]) -> "SweepData":
    """Return the sweep's rows from the store, or from files if there is no store."""
    from runner.report.from_files import sweep_from_files
    from runner.report.from_store import sweep_from_store

    spec, ids = session.spec, session.parent.ids
    if ids.parent_run is not None:
        try:
            stored = sweep_from_store(session.tracker, session.tracker.run(ids.parent_run))
            return replace(stored, rows=(*stored.rows, *_lost_rows(session)))
        except TrackingError as error:
            problems.append(str(error))
    return sweep_from_files(
        session.parent.folder,
        ids.sweep,
        title=spec.title,
        question=spec.question,
        swept=spec.swept,
        started_ms=session.started_ms,
        command=spec.command,
    )


def _lost_rows(session: Session) -> list["SweepRow"]:
    """Return rows for lost jobs, which have no run in the sweep: cut-off attempts are removed."""
    from runner.report.sweep_data import SweepRow

    return [
        SweepRow(
            name=run_name(job.choices, job.overrides, session.spec.swept),
            settings={**asdict(job.choices), **override_values(without_elsewhere(job.overrides))},
            metrics={},
            status="lost",
            error=session.ends[key].error,
            run_id=None,
            folder=None,
        )
        for key, job in session.jobs.items()
        if session.ends[key].status == "lost"
    ]


def _record(session: Session, report: Path, data: "SweepData", problems: list[str]) -> None:
    """Log the sweep's metrics and report, and print their locations."""
    from runner.report.html import kept_copy

    counts = Counter(end.status for end in session.ends.values())
    metrics = {"jobs": len(session.ends), **{f"jobs_{name}": n for name, n in counts.items()}}
    show(f"report:    {shown_path(report)}")
    parent = session.parent.ids.parent_run
    try:
        with kept_copy(report, data) as copy:
            session.tracker.log_sweep(parent, metrics=metrics, files=[copy])
        announce_page(session.tracker.comparison_page(parent))
    except TrackingError as error:
        problems.append(str(error))


def _lost_files(session: Session) -> list[str]:
    """Return a line on jobs whose result is in the store but not in their folder.

    The store has everything that the tables show. Jobs without a folder, which was deleted on
    purpose, and jobs run by another sweep are not mentioned.
    """
    parent = session.parent
    lost = []
    for key, end in session.ends.items():
        if not (end.known and end.run_id and end.parent_run == parent.ids.parent_run):
            continue
        job_path = parent.folder / job_folder(session.jobs[key], session.config)
        if job_path.is_dir() and not _is_sound(job_path / RESULT_FILE):
            lost.append((job_path, end.run_id))
    if not lost:
        return []
    job_path, run_id = lost[0]
    which = f"{shown_path(job_path)}, run {run_id}" + (", ..." if len(lost) > 1 else "")
    return [
        f"files:     {RESULT_FILE} of {counted(len(lost), 'settled job')} is damaged or missing "
        f"({which}); these results are shown from MLflow"
    ]


def _is_sound(path: Path) -> bool:
    try:
        read_result(path)
    except FxpartError:
        return False
    return True
