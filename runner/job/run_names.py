"""What runs and sweeps are called: what tells one from the others comes first."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict

from runner.job.identity import Choices, override_values
from runner.job.values import deciding

__all__ = ["run_name", "sweep_title"]

_BETWEEN, _CUT = " · ", "…"
_MOST_NAME, _MOST_TITLE, _MOST_VALUE = 120, 100, 32
"""Characters: more of it no table and no legend shows."""
_ALL_VALUES = 4
"""Of a key of a sweep; of more the first and the last stand for the others."""
_SAID_BY_MODEL = ("model.factory", "model.architecture")
_DECIDE_NOTHING = ("experiment", "capture.cache_dir", "capture.use_cache", "execute.timeout_s")
_NAMES = ("name", "source", "spec")
"""Last parts of keys that only name what others decide."""


def run_name(choices: Choices, overrides: Sequence[str], swept: Sequence[str] = ()) -> str:
    """Return a short name that reads at a glance: what tells the run from others, then the rest.

    First the values of the `swept` keys, of a job of a sweep; then the four choices, and last those
    of its `overrides` that decide something beside:
    ``layers=12 · cost_aware · 2x16gb · pcie4 · mine · batch_size=8``.
    """
    said = override_values(overrides)
    four = {key: asdict(choices)[key] for key in ("mode", "devices", "transfer_rate", "model")}
    varied = {key: said[key] for key in swept if key in said}
    rest = {key: text for key, text in four.items() if key not in varied}
    beside = _beside(override_values(deciding(overrides)))
    return _cut(_BETWEEN.join(_parts({**varied, **rest, **beside}, four)), _MOST_NAME)


def sweep_title(name: str, values: Mapping[str, Sequence[str]]) -> str:
    """Return `name` with the swept keys and their `values`, such as ``sweep: layers=12,24``.

    Where there is no room for all of them, it has the first and the last, or how many there are.
    """
    labels, text = _labels(values), name
    for most in (_ALL_VALUES, 2, 0):
        parts = [f"{labels[key]}{_listed(texts, most)}" for key, texts in values.items()]
        text = f"{name}: {_BETWEEN.join(parts)}" if parts else name
        if len(text) <= _MOST_TITLE:
            break
    return _cut(text, _MOST_TITLE)


def _beside(decide: Mapping[str, str]) -> dict[str, str]:
    """Return what a run is named by, beside the four choices."""
    aside = (*Choices.__slots__, *_SAID_BY_MODEL, *_DECIDE_NOTHING)
    return {
        key: text
        for key, text in decide.items()
        if key not in aside and key.rpartition(".")[2] not in _NAMES
    }


def _parts(values: Mapping[str, str], bare: Iterable[str]) -> list[str]:
    """Return the values with their labels, those of the `bare` keys without."""
    labels = _labels([key for key in values if key not in bare])
    return [
        f"{labels[key]}={_value(text)}" if key in labels else _value(text)
        for key, text in values.items()
    ]


def _labels(keys: Iterable[str]) -> dict[str, str]:
    """Return the last part of each key, and more of it where two would have the same."""
    parts = {key: key.split(".") for key in keys}
    labels = {}
    for key, mine in parts.items():
        others = [theirs for other, theirs in parts.items() if other != key]
        # A number alone, as of an item of a list, says nothing.
        count = 2 if mine[-1].isdigit() else 1
        while count < len(mine) and any(theirs[-count:] == mine[-count:] for theirs in others):
            count += 1
        labels[key] = ".".join(mine[-count:])
    return labels


def _listed(texts: Sequence[str], most: int) -> str:
    """Return what follows a key of which at most so many values are said."""
    shown = [_value(text) for text in texts]
    if len(shown) > most:
        if not most:
            return f" ({len(shown)})"
        shown = [*shown[: most // 2], _CUT, shown[-1]]
    return f"={','.join(shown)}"


def _value(text: str) -> str:
    """Return `text`, of a long one both ends: paths differ in the one or in the other."""
    text = " ".join(text.split())
    if len(text) <= _MOST_VALUE:
        return text
    end = _MOST_VALUE // 2
    return f"{text[: _MOST_VALUE - end - 1]}{_CUT}{text[-end:]}"


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 1].rstrip(" ·") + _CUT
