"""What a sweep found, in a sentence or two."""

from dataclasses import dataclass
from statistics import median

from runner.output.terminal import counted
from runner.report.measures import number
from runner.report.ranking import RankedRow, Ranking
from runner.report.settings import cell

__all__ = ["Verdict", "counts_text", "verdict"]


_PER = {"microbatch_ms": " per microbatch", "example_ms": " per example"}
"""What a time is of, where it is not of an input."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The answer for one model."""

    model: str
    sentence: str
    """The best, by how much it is better, and what it costs."""
    instead: tuple[str, ...]
    """What to take when devices or memory matter more, one line each."""


def verdict(ranking: Ranking, model: str) -> Verdict:
    """Return the answer for `model`, which has a result."""
    rows = ranking.of_model(model)
    best, by = rows[0], ranking.by
    times = [by.value(row.row) or 0.0 for row in rows]
    equal = sum(1 for row in rows if row.best) - 1
    also = f" (and {counted(equal, 'other')} equal to it)" if equal else ""
    sentence = f"{_named(ranking, best)}{also}: {by.text(best.row)} {by.unit}"
    sentence += _PER.get(by.key, "")
    middle, worst = median(times), max(times)
    if len(rows) == 1:
        sentence += ", the only result"
    elif worst > times[0]:
        sentence += (
            f", {_less(times[0], middle)} less than the median of {len(rows)} results and"
            f" {_less(times[0], worst)} less than the slowest"
        )
    else:
        sentence += f", as all {len(rows)} results"
    return Verdict(model, f"{sentence}. {_costs(ranking, best)}", _instead(ranking, rows))


def _named(ranking: Ranking, row: RankedRow) -> str:
    keys = [key for key in ranking.keys if key not in ranking.model_keys]
    named = " ".join(f"{key}={cell(row.row, key)}" for key in keys)
    return named or row.row.name


def _less(least: float, other: float) -> str:
    return f"{(1 - least / other) * 100:.1f} %" if other > 0 else "0.0 %"


def _costs(ranking: Ranking, row: RankedRow) -> str:
    used = number(row.row, "devices_used")
    held = f"{ranking.memory.text(row.row)} {ranking.memory.unit}"
    if used is None:
        return f"Its fullest device holds {held}."
    if used == 1:
        return f"It uses 1 device, which holds {held}."
    return f"It uses {used:.0f} devices, the fullest of which holds {held}."


def _instead(ranking: Ranking, rows: tuple[RankedRow, ...]) -> tuple[str, ...]:
    """Return the Pareto-optimal ones with the fewest devices and with the least memory."""
    best = rows[0]
    words: dict[int, list[str]] = {}
    for word, key in (("fewest devices", "devices_used"), ("least memory", ranking.memory.key)):
        # Of equals the one that is named in the fewest words: no box with devices left idle.
        said = [
            (value, ranking.by.value(row.row) or 0.0, len(_named(ranking, row)), index)
            for index, row in enumerate(rows)
            if row.pareto and (value := number(row.row, key)) is not None
        ]
        least, *_, index = min(said, default=(0.0, 0.0, 0, 0))
        if least < (number(best.row, key) or 0.0):
            words.setdefault(index, []).append(word)
    return tuple(
        f"{_capital(said)}: {_compared(ranking, rows[index], best)}"
        for index, said in words.items()
    )


def _capital(words: list[str]) -> str:
    text = " and ".join(words)
    return text[0].upper() + text[1:]


def _compared(ranking: Ranking, row: RankedRow, best: RankedRow) -> str:
    time, least = ranking.by.value(row.row) or 0.0, ranking.by.value(best.row) or 0.0
    more = f" (+{(time / least - 1) * 100:.1f} %)" if least > 0 else ""
    used = number(row.row, "devices_used")
    devices = f", {counted(int(used), 'device')}" if used is not None else ""
    held = f"{ranking.memory.text(row.row)} {ranking.memory.unit}"
    return (
        f"{_named(ranking, row)}, {ranking.by.text(row.row)} {ranking.by.unit}"
        f"{_PER.get(ranking.by.key, '')}{more}, {held}"
        f"{devices}"
    )


_COUNTED_WITH = {"failed": ("lost",)}
"""What a reader need not tell apart."""


def counts_text(ranking: Ranking) -> list[tuple[str, str]]:
    """Return how many jobs ended in which way: ``(status, words)``, only of those there are."""
    words = {
        "infeasible": "does not fit" if ranking.count("infeasible") == 1 else "do not fit",
        "failed": "failed",
        "cut_off": "cut off",
        "running": "running",
    }
    found = [("finished", f"{len(ranking.finished)} finished")]
    for status, said in words.items():
        count = sum(ranking.count(one) for one in (status, *_COUNTED_WITH.get(status, ())))
        if count:
            found.append((status, f"{count} {said}"))
    return found
