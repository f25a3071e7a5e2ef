"""Figures of `measured.json`, and what is said of those that no run stands for."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

__all__ = ["count_left_out", "published"]


def published(data: Path, *sources: str) -> list[dict[str, Any]]:
    """Return the figures whose source has one of `sources` in it, in the order of the file.

    Raises:
        FileNotFoundError: where `data` does not hold the file.

    """
    with (data / "measured.json").open(encoding="utf-8") as file:
        points = json.load(file)
    return [point for point in points if any(name in point["source"] for name in sources)]


def count_left_out(left_out: Counter[str]) -> None:
    """Print how many figures were left out, by reason."""
    if left_out:
        print(f"{left_out.total()} rows are left out: {dict(left_out)}")
