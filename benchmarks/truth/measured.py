"""Find the published files, read the figures of `measured.json` and report those left out."""

import hashlib
import json
from argparse import ArgumentParser
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

__all__ = [
    "add_data_argument",
    "count_left_out",
    "is_in_host_fit",
    "published",
    "skipped_without_files",
]


def add_data_argument(parser: ArgumentParser) -> None:
    """Add ``--data FOLDER``, the folder of the published files or one that has it as ``truth``."""

    def folder(given: str) -> Path:
        inside = Path(given) / "truth"
        return inside if inside.is_dir() else Path(given)

    parser.add_argument("--data", type=folder, required=True, help="folder of the published files")


@contextmanager
def skipped_without_files(name: str) -> Iterator[None]:
    """Leave the block with a message at the first published file that is missing."""
    try:
        yield
    except FileNotFoundError as error:
        print(f"{name} is skipped: there is no {error.filename}")


def published(data: Path, *sources: str) -> list[dict[str, Any]]:
    """Return the figures whose source contains one of `sources`, in the order of the file.

    Raises:
        FileNotFoundError: if `data` lacks the file.

    """
    with (data / "measured.json").open(encoding="utf-8") as file:
        points = json.load(file)
    return [point for point in points if any(name in point["source"] for name in sources)]


def count_left_out(left_out: Counter[str]) -> None:
    """Print the number of figures left out, by reason."""
    if left_out:
        print(f"{left_out.total()} rows are left out: {dict(left_out)}")


def is_in_host_fit(label: str) -> bool:
    """Return whether `fit_host` may fit to an eager run: half of them, by their labels."""
    return hashlib.sha256(label.encode()).digest()[0] % 2 == 1
