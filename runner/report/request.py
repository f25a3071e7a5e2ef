"""What the command line of a report asks for."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fxpart.errors import SpecError
from runner.cli.ending import Parser

__all__ = ["ALL", "LATEST", "Request", "parsed"]

ALL, LATEST = "all", "latest"


@dataclass(frozen=True, slots=True)
class Request:
    """What the command line asks for."""

    experiment: str
    sweep: str
    """``latest``, ``all`` or the id of a sweep's run."""
    against: str | None
    """The id of the sweep's run that it is compared with, if with one."""
    uri: str | None
    """Of the store; None where runs are kept if nobody says otherwise."""
    output: Path
    """Folder of the report."""
    rows: int
    """Of the table in the terminal."""


def parsed(arguments: Sequence[str]) -> Request:
    """Return what `arguments` ask for. Raises `SpecError` for what means nothing here."""
    found = _parser().parse_args(arguments)
    if found.rows < 1:
        raise SpecError(f"--rows {found.rows} shows nothing; give 1 or more")
    sweep, against = _sweeps(found.sweep or [], found.against or [])
    folder = re.sub(r"[^\w.-]+", "_", found.experiment).strip(".") or "_"
    output = Path(found.output or Path("outputs", "reports", folder))
    return Request(found.experiment, sweep, against, found.uri, output, found.rows)


def _parser() -> Parser:
    parser = Parser(
        prog="python -m runner.report",
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


def _sweeps(asked: list[str], against: list[str]) -> tuple[str, str | None]:
    """Return the one sweep that is asked for and the one that it is compared with."""
    if len(asked) > 1:
        raise SpecError(
            f"--sweep {' and --sweep '.join(asked)}: a report is of one sweep; to compare two, say"
            f" --sweep {asked[-1]} --against {asked[0]}"
        )
    if len(against) > 1:
        raise SpecError(
            f"--against {' and --against '.join(against)}: two sweeps are compared; give one"
        )
    sweep = asked[0] if asked else LATEST
    if against and ALL in (sweep, *against):
        raise SpecError("two sweeps are compared, not all; give an id to --sweep and to --against")
    return sweep, against[0] if against else None
