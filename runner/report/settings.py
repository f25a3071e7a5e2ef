"""Which settings of a sweep's jobs are worth a column, and what their columns are called."""

import re
from collections.abc import Sequence

from runner.report.rows import SweepData, SweepRow

__all__ = ["CHOICES", "cell", "headings", "in_parts", "shared_settings", "varied"]

CHOICES = ("model", "mode", "devices", "transfer_rate")


_PART = re.compile(r"(?<=[_+,:/])(?=[^_+,:/])")
"""Where a setting that is too long goes on in the next line."""


def cell(row: SweepRow, key: str) -> str:
    """Return the setting as it is shown, ``-`` where the job has none."""
    return row.settings.get(key, "-")


def in_parts(row: SweepRow, key: str) -> str:
    """Return the setting in several lines, one for each part of it."""
    return _PART.sub("\n", cell(row, key))


def varied(data: SweepData) -> tuple[str, ...]:
    """Return the keys to show: the swept keys, and what else the jobs differ in.

    Left out is what says the same as a key before it (the factory that a model is named after),
    and what follows from the swept keys, or from one key before it (the options of a mode).
    """
    rows = data.rows
    order = dict.fromkeys([*CHOICES, *data.swept, *(key for row in rows for key in row.settings)])
    shown: dict[str, tuple[str, ...]] = {}
    for key in order:
        cells = tuple(cell(row, key) for row in rows)
        if len(set(cells)) < 2 or (key not in CHOICES and cells in shown.values()):
            continue
        if key in CHOICES or key in data.swept or not _follows(key, cells, shown, data.swept):
            shown[key] = cells
    return tuple(shown)


def _follows(
    key: str, cells: Sequence[str], shown: dict[str, tuple[str, ...]], swept: Sequence[str]
) -> bool:
    """Return whether the column `cells` says nothing that columns before it do not."""
    together = [shown[name] for name in swept if name in shown]
    if together and _decide(list(zip(*together, strict=True)), cells):
        return True
    group = key.partition(".")[0]
    return any(_decide(known, cells) for name, known in shown.items() if name in (group, *CHOICES))


def _decide(known: Sequence[object], cells: Sequence[str]) -> bool:
    """Return whether equal items of `known` always stand beside equal `cells`."""
    seen: dict[object, str] = {}
    return all(seen.setdefault(k, text) == text for k, text in zip(known, cells, strict=True))


def shared_settings(data: SweepData, shown: Sequence[str]) -> dict[str, str]:
    """Return the choices that all jobs share, which have no column."""
    if not data.rows:
        return {}
    first = data.rows[0]
    return {k: cell(first, k) for k in CHOICES if k not in shown and k in first.settings}


def headings(keys: Sequence[str]) -> dict[str, str]:
    """Return the last part of each key, or all of it where another ends alike."""
    last = [key.rpartition(".")[2] for key in keys]
    names = (name if last.count(name) == 1 else key for key, name in zip(keys, last, strict=True))
    return {key: name.replace("_", " ") for key, name in zip(keys, names, strict=True)}
