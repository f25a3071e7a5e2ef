"""A run's configuration as plain values and as tags of a tracker, to run it again as it was.

The tags ``config.0``, ``config.1`` and so on, put together, are one line of JSON. Where a run is
kept is no part of it: that may hold a password.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import MISSING, asdict, fields, is_dataclass
from types import NoneType, UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from fxpart.errors import SpecError, nearest_names
from runner.config.sections import Config

__all__ = [
    "PIECE_LENGTH",
    "config_document",
    "config_from_document",
    "config_from_tags",
    "config_tags",
    "config_text",
]

_Made = TypeVar("_Made")
PREFIX = "config."
PIECE_LENGTH = 5000
"""Characters of one tag at most: stores keep 5000 to 8000."""
_PAIRS = "(pairs)"
"""The one key of a mapping that stands for one with keys that JSON does not have."""
_ELSEWHERE = "tracking"


def config_document(config: Config) -> dict[str, object]:
    """Return `config` in types that JSON has; `config_from_document` is the way back."""
    document = _plain(asdict(config))
    assert isinstance(document, dict), "keys of a dataclass are text"
    return document


def config_from_document(document: Mapping[str, object]) -> Config:
    """Return the configuration that `config_document` has written; what is left out is as usual.

    Raises:
        SpecError: for a document that is not of this form, in one line.

    """
    try:
        values = _unplain(dict(document))
    except (TypeError, ValueError) as error:
        raise _damaged(f"one of its {_PAIRS} is none: {error}") from error
    return _section(Config, values, "")


def config_tags(config: Config) -> dict[str, str]:
    """Return tags of at most `PIECE_LENGTH` characters that say `config`, its tracking left out."""
    document = {key: value for key, value in config_document(config).items() if key != _ELSEWHERE}
    text = json.dumps(document, separators=(",", ":"))
    starts = range(0, len(text), PIECE_LENGTH)
    return {
        f"{PREFIX}{number}": text[start : start + PIECE_LENGTH]
        for number, start in enumerate(starts)
    }


def config_text(tags: Mapping[str, str]) -> str:
    """Return the JSON that a run's `tags` hold in pieces; empty when they hold none."""
    numbers = range(len(tags))
    return "".join(tags[name] for number in numbers if (name := f"{PREFIX}{number}") in tags)


def config_from_tags(tags: Mapping[str, str]) -> Config:
    """Return the configuration that a run's `tags` say; its tracking is the usual one.

    Raises:
        SpecError: when they say none, or not all of one, in one line.

    """
    text = config_text(tags)
    if not text:
        raise SpecError(
            f"the run has no tag {PREFIX}0, so what it ran is not known; name a run that this"
            " command has logged, not the parent of a sweep"
        )
    try:
        document = json.loads(text)
    except ValueError as error:
        raise _damaged(f"they are no whole JSON: {error}") from error
    if not isinstance(document, dict):
        raise _damaged(f"they are a {type(document).__name__}, not sections")
    return config_from_document(document)


def _damaged(what: str) -> SpecError:
    return SpecError(
        f"the configuration that the run was logged with cannot be used: {what}; run it again from"
        " its overrides"
    )


def _plain(item: object) -> object:
    """Return `item` with mappings that JSON can say: a number as a key is another than its text."""
    if isinstance(item, Mapping):
        if all(isinstance(key, str) and key != _PAIRS for key in item):
            return {key: _plain(value) for key, value in item.items()}
        return {_PAIRS: [[key, _plain(value)] for key, value in item.items()]}
    return [_plain(value) for value in item] if isinstance(item, list | tuple) else item


def _unplain(item: object) -> object:
    if isinstance(item, dict):
        if list(item) == [_PAIRS]:
            return {key: _unplain(value) for key, value in item[_PAIRS]}
        return {key: _unplain(value) for key, value in item.items()}
    return [_unplain(value) for value in item] if isinstance(item, list) else item


def _section(section: type[_Made], values: object, path: str) -> _Made:
    """Return the dataclass `section` with `values`; `path` is where it stands, for errors."""
    if not isinstance(values, dict):
        raise _damaged(f"{path.rstrip('.') or 'it'} is {values!r}, not a section")
    hints = get_type_hints(section)
    for key in values:
        if key not in hints:
            raise _damaged(f"{path}{key} does not exist here; {nearest_names(str(key), hints)}")
    for field in fields(section):  # type: ignore[arg-type]
        needed = field.default is MISSING and field.default_factory is MISSING
        if needed and field.name not in values:
            raise _damaged(f"{path}{field.name} is missing")
    return section(
        **{key: _value(hints[key], value, f"{path}{key}") for key, value in values.items()}
    )


def _value(hint: object, value: object, path: str) -> object:
    """Return `value` as a field of the type `hint` has it."""
    if isinstance(hint, UnionType):  # with None
        if value is None:
            return None
        (hint,) = (one for one in get_args(hint) if one is not NoneType)
    if isinstance(hint, type) and is_dataclass(hint):
        return _section(hint, value, f"{path}.")
    kind = get_origin(hint) or hint
    if kind is float and type(value) is int:
        return float(value)
    # Of `True` Python says that it is an int.
    if kind is not Any and type(value) is not kind:
        name = kind.__name__ if isinstance(kind, type) else str(kind)
        raise _damaged(f"{path} is {value!r}, which is not of the type {name}")
    make = _MEMBERS.get(kind)
    return value if make is None else make(hint, value, path)


def _list(hint: object, value: Any, path: str) -> object:  # noqa: ANN401 - of whatever is logged
    (inner,) = get_args(hint)
    return [_value(inner, one, f"{path}.{place}") for place, one in enumerate(value)]


def _dict(hint: object, value: Any, path: str) -> object:  # noqa: ANN401
    _, inner = get_args(hint)
    return {key: _value(inner, one, f"{path}.{key}") for key, one in value.items()}


_MEMBERS: Mapping[object, Callable[[object, Any, str], object]] = {list: _list, dict: _dict}
