"""Read the figures of `measured.json` and report those left out of a set."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

__all__ = ["count_left_out", "published"]


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
