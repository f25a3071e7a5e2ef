"""The findings of a sweep as text: the best job of each model, and why jobs have no result."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from runner.output.metrics import BY_OBJECTIVE
from runner.output.terminal import counted
from runner.report.ranking import Measure, RankedRow, Ranking, number
from runner.report.sweep_data import CHOICES, SweepData, SweepRow, cell, varied

__all__ = [
    "Verdict",
    "counts_text",
    "settings_text",
    "status_word",
    "sweep_reasons",
    "traded",
    "verdict",
]


_NAMED_AS_THEY_ARE = {BY_OBJECTIVE[name][0] for name in ("throughput", "memory", "energy")}


@dataclass(frozen=True, slots=True)
class Verdict:
    """The conclusion for one model."""

    model: str
    sentence: str
    """The best job, its advantage, and its cost."""
    instead: tuple[str, ...]
    """Alternatives with fewer devices or less memory, one line each."""


def verdict(ranking: Ranking, model: str) -> Verdict:
    """Return the conclusion for `model`, which has a result."""
    rows = ranking.of_model(model)
    best = rows[0]
    times = [ranking.by.value(row.row) or 0.0 for row in rows]
    equal = sum(row.best for row in rows) - 1
    ties = f" (and {counted(equal, 'other')} equal to it)" if equal else ""
    sentence = f"{_settings(ranking, best)}{ties}: {_time(ranking, best)}"
    middle, worst = median(times), max(times)
    worst_word = "largest" if ranking.by.key in _NAMED_AS_THEY_ARE else "slowest"
    if len(rows) == 1:
        sentence += ", the only result"
    elif worst > times[0]:
        sentence += (
            f", {_less(times[0], middle)} less than the median of {len(rows)} results and"
            f" {_less(times[0], worst)} less than the {worst_word}"
        )
    else:
        sentence += f", as all {len(rows)} results"
    return Verdict(model, f"{sentence}. {_costs(ranking, best)}", _instead(ranking, rows))


def _settings(ranking: Ranking, row: RankedRow) -> str:
    keys = [key for key in ranking.keys if key not in ranking.model_keys]
    return " ".join(f"{key}={cell(row.row, key)}" for key in keys) or row.row.name


def _amount(measure: Measure, row: RankedRow) -> str:
    return f"{measure.text(row.row)} {measure.unit}"


def _time(ranking: Ranking, row: RankedRow) -> str:
    per = ranking.by.metric.per
    return _amount(ranking.by, row) + (f" per {per}" if per else "")


def _less(lowest: float, other: float) -> str:
    return f"{(1 - lowest / other) * 100:.1f} %" if other > 0 else "0.0 %"


def traded(ranking: Ranking) -> str:
    """Return the two measures to weigh against each other, such as ``time, peak``."""
    is_time = ranking.by.key not in _NAMED_AS_THEY_ARE
    return f"{'time' if is_time else ranking.by.name}, {ranking.against.name}"


def _costs(ranking: Ranking, row: RankedRow) -> str:
    used, peak = number(row.row, "devices_used"), _amount(ranking.memory, row)
    if used is None:
        return f"Its fullest device holds {peak}."
    if used == 1:
        return f"It uses 1 device, which holds {peak}."
    return f"It uses {used:.0f} devices, the fullest of which holds {peak}."


def _instead(ranking: Ranking, rows: tuple[RankedRow, ...]) -> tuple[str, ...]:
    """Return lines on the Pareto-optimal jobs with the fewest devices and the least memory.

    Instead of the least memory it is the lowest latency, if they are ranked by memory.
    """
    best = rows[0]
    merits: dict[int, list[str]] = {}
    against = ranking.against
    merit_against = "least memory" if against is ranking.memory else f"lowest {against.name}"
    for merit, key in (("fewest devices", "devices_used"), (merit_against, against.key)):
        # Ties go to the shortest settings, which avoids machines with idle devices.
        candidates = [
            (value, ranking.by.value(row.row) or 0.0, len(_settings(ranking, row)), index)
            for index, row in enumerate(rows)
            if row.pareto and (value := number(row.row, key)) is not None
        ]
        lowest, *_, index = min(candidates, default=(0.0, 0.0, 0, 0))
        if lowest < (number(best.row, key) or 0.0):
            merits.setdefault(index, []).append(merit)
    return tuple(
        f"{' and '.join(names).capitalize()}: {_compared(ranking, rows[index], best)}"
        for index, names in merits.items()
    )


def _compared(ranking: Ranking, row: RankedRow, best: RankedRow) -> str:
    time, best_time = ranking.by.value(row.row) or 0.0, ranking.by.value(best.row) or 0.0
    increase = f" (+{(time / best_time - 1) * 100:.1f} %)" if best_time > 0 else ""
    used = number(row.row, "devices_used")
    devices = f", {counted(int(used), 'device')}" if used is not None else ""
    costs = f"{_time(ranking, row)}{increase}, {_amount(ranking.against, row)}{devices}"
    return f"{_settings(ranking, row)}, {costs}"


def counts_text(ranking: Ranking) -> list[tuple[str, str]]:
    """Return the number of jobs by status, as ``(status, text)``, without empty ones."""
    count = ranking.count
    counts = (
        ("infeasible", count("infeasible"), _fit(count("infeasible"))),
        ("not_applicable", count("not_applicable"), "not applicable"),
        ("failed", count("failed") + count("lost"), "failed"),
        ("cut_off", count("cut_off"), "cut off"),
        ("running", count("running"), "running"),
    )
    finished_text = ("finished", f"{len(ranking.finished)} finished")
    return [finished_text, *((status, f"{n} {words}") for status, n, words in counts if n)]


def _fit(count: int) -> str:
    return "does not fit" if count == 1 else "do not fit"


# Why jobs have no result: similar reasons are grouped, with the settings that their jobs share.

_GROUP_WORDS = {
    "infeasible": "do not fit",
    "not_applicable": "do not apply",
    "failed": "failed",
    "lost": "were lost",
    "cut_off": "were cut off",
    "running": "are running",
}
_LOST = "lost: its process was killed"
_ALONE = 2
"""Most jobs with a similar reason that have a line each."""
_MOST_VALUES = 4
_NUMBERS = re.compile(r"\d[\d.,]*(?: \d[\d.,]*)*")


def status_word(row: SweepRow) -> str:
    """Return the status of a job without a result, as text for a table."""
    return row.status.replace("_", " ") if row.status in _GROUP_WORDS else "failed"


def sweep_reasons(data: SweepData, max_lines: int | None = None) -> list[str]:
    """Return lines on why jobs have no result, with a single one for many similar reasons.

    Reasons are similar if they differ only in numbers and in the jobs' own settings; the first one
    is quoted. If there are more than `max_lines` lines, the last has the number left out. Running
    jobs have no line.
    """
    groups: dict[tuple[str, str], list[SweepRow]] = {}
    for row in data.rows:
        if row.status not in ("finished", "running") or (row.error and row.status == "finished"):
            groups.setdefault((row.status, _pattern(row)), []).append(row)
    shown = varied(data)
    # Shared settings carry no information, but are better than none.
    keys = [key for key in dict.fromkeys([*CHOICES, *shown]) if key in shown] or list(CHOICES)
    lines = [line for rows in groups.values() for line in _lines(rows, keys)]
    if max_lines is not None and len(lines) > max_lines:
        left_out = len(lines) - max_lines + 1
        lines = [*lines[: max_lines - 1], f"and {left_out} more reasons; the report has all"]
    return lines


def _pattern(row: SweepRow) -> str:
    """Return the reason with job-specific settings and numbers masked."""
    text = row.error or ""
    for value in row.settings.values():
        if len(value) > 1 and not value.isdigit():
            text = text.replace(value, "$")
    return _NUMBERS.sub("#", text)


def _lines(rows: Sequence[SweepRow], keys: Sequence[str]) -> list[str]:
    if len(rows) <= _ALONE:
        return [f"{settings_text([row], keys)}: {_reason(row)}" for row in rows]
    same = len({row.error for row in rows}) == 1
    first = _reason(rows[0])
    return [
        f"{len(rows)} jobs {_GROUP_WORDS.get(rows[0].status, 'say')}"
        f" ({settings_text(rows, keys)}): {first if same else f'such as: {first}'}"
    ]


def _reason(row: SweepRow) -> str:
    if row.error:
        return row.error
    return _LOST if row.status == "lost" else row.status.replace("_", " ")


def settings_text(rows: Sequence[SweepRow], keys: Sequence[str]) -> str:
    """Return the settings of `rows` as overrides, or the number of values if there are many."""
    parts = []
    for key in keys:
        if not any(key in row.settings for row in rows):
            continue
        values = list(dict.fromkeys(cell(row, key) for row in rows))
        few = len(values) <= _MOST_VALUES
        parts.append(f"{key}={','.join(values)}" if few else f"{len(values)} values of {key}")
    return (" " if all("=" in part for part in parts) else ", ").join(parts)
