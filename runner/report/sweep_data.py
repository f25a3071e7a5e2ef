"""A sweep as data for its report, from any source, and the choice of settings to show."""

import math
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from runner.config.schema import RECOMMEND_OPTIONS

__all__ = [
    "CHOICES",
    "EFFECTIVE_BATCH",
    "LATEST",
    "PLAN",
    "SweepData",
    "SweepRow",
    "as_number",
    "cell",
    "chosen_by_plans",
    "headings",
    "in_order",
    "model_keys",
    "model_label",
    "model_order",
    "models_first",
    "shared_settings",
    "shortened",
    "typed_settings",
    "varied",
    "with_effective_batch",
]

LATEST = "latest"
"""The identifier of the newest sweep of an experiment."""


@dataclass(frozen=True, slots=True)
class SweepRow:
    """A job of a sweep and its outcome."""

    name: str
    settings: Mapping[str, str]
    """Parameters as text, by key: choices by name, others by dotted key."""
    metrics: Mapping[str, float]
    """Metrics by the names in `runner.output.metrics`."""
    status: str
    """``finished``, ``infeasible``, ``not_applicable`` (incompatible choices), ``failed``,
    ``lost`` (its process was killed), ``cut_off`` or ``running``."""
    error: str | None
    """Why there is no result, in one line."""
    run_id: str | None
    """The id of the run in MLflow, if any."""
    folder: str | None
    """The folder of its files, if known."""


@dataclass(frozen=True, slots=True)
class SweepData:
    """A sweep and its jobs."""

    title: str
    question: str
    """The question that the sweep answers; may be empty."""
    swept: tuple[str, ...]
    """The keys with several values, in the order of the command."""
    rows: tuple[SweepRow, ...]
    started_ms: int | None
    """Start in milliseconds since 1970 UTC."""
    command: str | None
    """The command that runs the sweep again."""
    of_several: bool = False
    """Whether its jobs are those of several commands."""


EFFECTIVE_BATCH = "effective_batch"
"""The setting added to jobs by `with_effective_batch`."""


def with_effective_batch(data: SweepData) -> SweepData:
    """Return `data` with the examples per step as a setting, if schedules are compared.

    That is, if jobs differ in their schedule and in their examples per step: those of a microbatch
    times the number of microbatches.
    """
    finished_rows = [row for row in data.rows if row.status == "finished"]
    schedules = {row.settings.get("schedule", "none") for row in finished_rows}
    sizes = {_effective_batch(row) for row in finished_rows}
    if min(len(schedules), len(sizes)) < 2 or None in sizes:
        return data
    rows = tuple(
        replace(row, settings={**row.settings, EFFECTIVE_BATCH: str(size)})
        if (size := _effective_batch(row)) is not None
        else row
        for row in data.rows
    )
    return replace(data, rows=rows)


def _effective_batch(row: SweepRow) -> int | None:
    texts = (row.settings.get("model.batch_size", ""), row.settings.get("microbatches", "1"))
    numbers = [int(text) for text in texts if text.isdecimal()]
    return numbers[0] * numbers[1] if len(numbers) == len(texts) else None


# The settings with a column, and the headings of columns.

_FILE, _GIVEN = "model.path", ("devices", "transfer_rate")
"""The file of a published problem, and what it replaces."""
CHOICES = ("model", "mode", "devices", "transfer_rate")
PLAN = "plan"
"""The plan chosen by a job with ``mode=recommend``: a result, not determined by other settings."""


def chosen_by_plans(data: SweepData) -> set[str]:
    """Return the settings that `PLAN` decides in any job of `data`, `PLAN` itself included."""
    chosen: set[str] = set()
    for row in data.rows:
        if PLAN in row.settings:
            degrees = (word.partition("=")[0] for word in row.settings[PLAN].split()[1:])
            options = (key for key in row.settings if key.startswith("mode."))
            chosen.update((PLAN, "plan.mode", "model.batch_size", *degrees, *options))
    of_request = tuple(f"mode.{name}" for name in RECOMMEND_OPTIONS)
    asked = {key for key in chosen if key.startswith(of_request)}
    return chosen - asked - set(data.swept)


def typed_settings(data: SweepData) -> dict[str, str]:
    """Return the settings in the command of `data`, by key."""
    command = data.command or ""
    try:
        words = shlex.split(command)
    except ValueError:  # cut off within quotes
        words = command.split()
    pairs = (word.partition("=") for word in words)
    return {key.lstrip("+"): value for key, equals, value in pairs if equals}


def cell(row: SweepRow, key: str) -> str:
    """Return a setting as text; ``-`` if the job has none."""
    return row.settings.get(key, "-")


def shortened(texts: Sequence[str], max_width: int) -> dict[str, str]:
    """Shorten each of `texts` in the middle to at most `max_width` characters.

    If different texts would look the same, they are shortened less.
    """
    texts = list(dict.fromkeys(texts))
    for width in range(max_width, max(map(len, texts), default=0) + 1):
        short = [_both_ends(text, width) for text in texts]
        if len(set(short)) == len(texts):
            return dict(zip(texts, short, strict=True))
    return {text: text for text in texts}


def _both_ends(text: str, width: int) -> str:
    if len(text) <= width:
        return text
    end = (width - 1) // 2
    return f"{text[: width - 1 - end]}…{text[len(text) - end :]}"


def varied(data: SweepData) -> tuple[str, ...]:
    """Return the keys to show: the swept keys, and others in which the jobs differ.

    Left out are keys that repeat an earlier one (the factory that a model is named after), and
    those that follow from the swept keys or from an earlier key (the options of a mode). Jobs of
    several commands may differ in any setting: nothing but the options of a choice follows then.
    """
    rows = data.rows
    settings = (key for row in rows for key in row.settings)
    keys = dict.fromkeys([*CHOICES, *data.swept, PLAN, *settings])
    shown: dict[str, tuple[str, ...]] = {}
    for key in keys:
        cells = tuple(cell(row, key) for row in rows)
        always_shown = (*CHOICES, EFFECTIVE_BATCH, PLAN)
        repeats = cells in shown.values() and not data.of_several
        if len(set(cells)) < 2 or (key not in always_shown and repeats):
            continue
        if key == _FILE and "model" in shown and _decide(shown["model"], cells):
            continue  # a model is named after its file
        is_shown = key in data.swept or key in always_shown
        if is_shown or not _follows(key, cells, shown, data):
            shown[key] = cells
    return tuple(shown)


def _follows(
    key: str, cells: Sequence[str], shown: dict[str, tuple[str, ...]], data: SweepData
) -> bool:
    """Return whether the column `cells` follows from earlier columns."""
    group = key.partition(".")[0]
    if data.of_several:
        return group != key and group in shown and _decide(shown[group], cells)
    together = [shown[name] for name in data.swept if name in shown]
    if together and _decide(list(zip(*together, strict=True)), cells):
        return True
    return any(_decide(known, cells) for name, known in shown.items() if name in (group, *CHOICES))


def _decide(known: Sequence[object], cells: Sequence[str]) -> bool:
    """Return whether `cells` is a function of `known`: equal items have equal cells."""
    first_of: dict[object, str] = {}
    return all(first_of.setdefault(k, text) == text for k, text in zip(known, cells, strict=True))


def shared_settings(data: SweepData, shown: Sequence[str]) -> dict[str, str]:
    """Return the choices and typed settings shared by all jobs, which have no column.

    Published problems have their own devices and links, which replace those of the choices.
    """
    if not data.rows:
        return {}
    first = data.rows[0]
    aside = _GIVEN if all(_FILE in row.settings for row in data.rows) else ()
    typed = typed_settings(data)
    keys = [key for key in (*CHOICES, PLAN, *typed) if key not in (*shown, *aside, *data.swept)]
    shared = {key: cell(first, key) for key in keys if key in first.settings}
    return {
        key: text for key, text in shared.items() if all(cell(r, key) == text for r in data.rows)
    }


def headings(keys: Sequence[str]) -> dict[str, str]:
    """Return the last part of each key, or all of it if another key has the same."""
    last = [key.rpartition(".")[2] for key in keys]
    names = (name if last.count(name) == 1 else key for key, name in zip(keys, last, strict=True))
    return {key: name.replace("_", " ") for key, name in zip(keys, names, strict=True)}


# The order of a setting's values.

_DIGITS = re.compile(r"(\d+(?:\.\d+)?)")


def as_number(text: str) -> float | None:
    """Return `text` as a number; None if it is not one, or not finite."""
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def in_order(best: Mapping[str, float | None]) -> list[str]:
    """Return the values of a setting in order, given the best result of each.

    Numbers are sorted by size, and so are names that contain numbers, such as ``2x16gb`` before
    ``16x16gb``. Other names are sorted by their result, best first.
    """
    numbers = {text: as_number(text) for text in best}
    if all(value is not None for value in numbers.values()):
        return sorted(best, key=lambda text: numbers[text] or 0.0)
    if all(_DIGITS.search(text) for text in best):
        return sorted(best, key=_digits_by_size)
    times = {text: math.inf if time is None else time for text, time in best.items()}
    return sorted(best, key=lambda text: (times[text], text))


def _digits_by_size(text: str) -> list[tuple[int, float, str]]:
    parts = [part for part in _DIGITS.split(text) if part]
    return [(0, float(p), "") if p[0].isdigit() else (1, 0.0, p) for p in parts]


# The settings that define the model, and the labels of a sweep's models.

_MODEL = ("model", "model.architecture", "model.factory", "model.config", "model.factory_args")
_MODEL_PARTS = ("model.config.", "model.factory_args.")


def model_keys(keys: Sequence[str]) -> tuple[str, ...]:
    """Return the `keys` that define the model; jobs of different models are not compared.

    Batch size, length and dtype are not among them, but schedules are only compared at equal
    `EFFECTIVE_BATCH`.
    """
    apart = (*_MODEL, EFFECTIVE_BATCH)
    return tuple(key for key in keys if key in apart or key.startswith(_MODEL_PARTS))


def models_first(keys: tuple[str, ...]) -> tuple[str, ...]:
    """Return `keys`, with those that define the model first."""
    models = model_keys(keys)
    return (*models, *(key for key in keys if key not in models))


def model_label(row: SweepRow, keys: Sequence[str]) -> str:
    """Return the label of a row's model, if models differ in `keys`.

    It is the name, such as ``gpt2``, with the settings that vary: ``gpt2 n_layer=12``.
    """
    last = [key.rpartition(".")[2] for key in keys]
    parts = [
        cell(row, key)
        if key == "model"
        else f"effective batch {text}"
        if key == EFFECTIVE_BATCH
        else f"{key if last.count(name) > 1 else name}={text}"
        for key, name in zip(keys, last, strict=True)
        if (text := row.settings.get(key)) is not None  # None if only other models have the setting
    ]
    return " ".join(parts) or cell(row, "model")


def model_order(row: SweepRow, keys: Sequence[str]) -> tuple[tuple[bool, float, str], ...]:
    """Return the sort key of a row's model: names alphabetically, numbers by size."""
    order = [(True, 0.0, cell(row, "model"))]
    for key in keys:
        text = cell(row, key)
        number = None if key == "model" else as_number(text)
        order.append((number is None, number or 0.0, text))
    return tuple(order)
