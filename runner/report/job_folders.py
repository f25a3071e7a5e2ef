"""Where on this machine the files of jobs are that a store knows, and what of them to look at."""

import json
import os
from collections.abc import Iterable
from pathlib import Path
from urllib.parse import quote

from runner.report.rows import SweepRow

__all__ = ["job_folders", "job_links"]

_RESULT = "result.json"
"""What each job leaves, also one that does not fit."""
_SHOWN = {
    "partition_graph.svg": "graph",
    "memory.svg": "memory",
    "schedule.svg": "schedule",
}
"""What a person looks at, and what a link to it says."""


def job_folders(roots: Iterable[Path]) -> dict[str, str]:
    """Return the folders of the jobs below `roots` by the keys that the jobs are known by.

    Of several folders of one job the one that was written last counts. What is not there, or
    cannot be read, is left out: a store may tell of another machine's folders.
    """
    newest: dict[str, tuple[int, str]] = {}
    for root in dict.fromkeys(roots):
        for path in root.rglob(_RESULT) if root.is_absolute() else ():
            try:
                found = json.loads(path.read_bytes())
                written_ns = path.stat().st_mtime_ns
            except (OSError, ValueError):
                continue
            key = found.get("key") if isinstance(found, dict) else None
            if isinstance(key, str):
                newest[key] = max(newest.get(key, (0, "")), (written_ns, str(path.parent)))
    return {key: folder for key, (_, folder) in newest.items()}


def job_links(row: SweepRow, place: Path) -> list[tuple[str, str]]:
    """Return ``(address, words)`` of the job's folder and its figures, as far as they are there.

    Addresses are relative to the folder `place`, so that both can be moved together.
    """
    if row.folder is None or not (folder := Path(row.folder)).is_dir():
        return []
    # A folder's address ends so, or what it links to is looked for beside it.
    links = [(f"{_address(folder, place)}/", "files")]
    figures = ((folder / name, words) for name, words in _SHOWN.items())
    return links + [(_address(path, place), words) for path, words in figures if path.is_file()]


def _address(path: Path, place: Path) -> str:
    relative = Path(os.path.relpath(path.resolve(), place.resolve())).as_posix()
    # A first part with a colon would be read as a protocol.
    return f"./{quote(relative)}"
