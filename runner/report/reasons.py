"""Why jobs have no result: alike reasons once, with what their jobs have in common."""

import re
from collections.abc import Sequence

from runner.report.rows import SweepData, SweepRow
from runner.report.settings import CHOICES, cell, varied

__all__ = ["STATUS_WORDS", "settings_text", "sweep_reasons"]

STATUS_WORDS = {
    "infeasible": "infeasible",
    "failed": "failed",
    "lost": "lost",
    "cut_off": "cut off",
    "running": "running",
}
"""As a cell of a table says it."""
_GROUP_WORDS = {
    "infeasible": "do not fit",
    "failed": "failed",
    "lost": "were lost",
    "cut_off": "were cut off",
    "running": "are running",
}
_WITHOUT_WORDS = {"lost": "lost: its process was killed"}
"""What is said of jobs that could not say anything."""
_ALONE = 2
"""As many alike are said one by one."""
_MOST_VALUES = 4
_NUMBER = re.compile(r"\d[\d.,]*")


def sweep_reasons(data: SweepData, most: int | None = None) -> list[str]:
    """Return why jobs have no result, a line for each, and one for many whose reasons are alike.

    Reasons are alike when they differ only in numbers and in the jobs' own settings; the first one
    is quoted. Of more than `most` lines the last says how many are left out. What runs has none.
    """
    groups: dict[tuple[str, str], list[SweepRow]] = {}
    for row in data.rows:
        if row.status not in ("finished", "running") or (row.error and row.status == "finished"):
            alike = (row.status, _pattern(row))
            groups.setdefault(alike, []).append(row)
    shown = varied(data)
    # What all share says nothing, unless there is nothing else.
    keys = [key for key in dict.fromkeys([*CHOICES, *shown]) if key in shown] or list(CHOICES)
    lines = [line for rows in groups.values() for line in _lines(rows, keys)]
    if most is not None and len(lines) > most:
        lines = [
            *lines[: most - 1],
            f"and {len(lines) - most + 1} more reasons; the report has all",
        ]
    return lines


def _pattern(row: SweepRow) -> str:
    """Return the reason without what differs from job to job."""
    said = row.error or ""
    for value in row.settings.values():
        if len(value) > 1 and not value.isdigit():
            said = said.replace(value, "$")
    return _NUMBER.sub("#", said)


def _lines(rows: Sequence[SweepRow], keys: Sequence[str]) -> list[str]:
    if len(rows) <= _ALONE:
        return [f"{settings_text([row], keys)}: {_reason(row)}" for row in rows]
    same = len({row.error for row in rows}) == 1
    told = _reason(rows[0])
    return [
        f"{len(rows)} jobs {_GROUP_WORDS.get(rows[0].status, 'say')}"
        f" ({settings_text(rows, keys)}): {told if same else f'such as: {told}'}"
    ]


def _reason(row: SweepRow) -> str:
    said = _WITHOUT_WORDS.get(row.status) or STATUS_WORDS.get(row.status, row.status)
    return row.error or said


def settings_text(rows: Sequence[SweepRow], keys: Sequence[str]) -> str:
    """Return the settings of `rows` as overrides; of many values only their number."""
    parts = []
    for key in keys:
        if not any(key in row.settings for row in rows):
            continue
        values = list(dict.fromkeys(cell(row, key) for row in rows))
        few = len(values) <= _MOST_VALUES
        parts.append(f"{key}={','.join(values)}" if few else f"{len(values)} values of {key}")
    return (" " if all("=" in part for part in parts) else ", ").join(parts)
