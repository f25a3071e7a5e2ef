"""Serialize a run's configuration as JSON and as tags in a tracker, to repeat the run.

The tags ``config.0``, ``config.1`` and so on are pieces of one line of JSON. The section
``tracking`` is left out, since it may hold a password.
"""

import json
from collections.abc import Mapping
from dataclasses import MISSING, asdict, fields, is_dataclass
from types import NoneType, UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from omegaconf import MISSING as NEEDED

from fxpart.errors import SpecError, nearest_names
from runner.config.schema import Config, sections_in

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
"""Most characters of one tag: stores accept 5000 to 8000."""
_PAIRS = "(pairs)"
"""The only key of a mapping that encodes one with keys other than text."""


def config_document(config: Config) -> dict[str, object]:
    """Return `config` as JSON types; `config_from_document` is the inverse."""
    document = _plain(asdict(config))
    assert isinstance(document, dict), "keys of a dataclass are text"
    return document


def config_from_document(document: Mapping[str, object]) -> Config:
    """Return the configuration of a `config_document`, with defaults for missing keys.

    Raises:
        SpecError: if the document is invalid.

    """
    try:
        values = _unplain(dict(document))
    except (TypeError, ValueError) as error:
        raise _damaged(f"one of its {_PAIRS} is none: {error}") from error
    config = _section(Config, values, "")
    _refuse_missing(config)
    return config


def _refuse_missing(config: Config) -> None:
    """Raise `SpecError` if a number without a default is missing in any section."""
    for section, path in sections_in(config):
        hints = get_type_hints(type(section))
        for key, value in vars(section).items():
            if hints[key] is not str and isinstance(value, str) and value == NEEDED:
                raise _damaged(f"{path}{key} is missing")


def config_tags(config: Config) -> dict[str, str]:
    """Return `config`, without its tracking, as tags of at most `PIECE_LENGTH` characters."""
    document = config_document(config)
    del document["tracking"]
    text = json.dumps(document, separators=(",", ":"))
    starts = range(0, len(text), PIECE_LENGTH)
    return {
        f"{PREFIX}{number}": text[start : start + PIECE_LENGTH]
        for number, start in enumerate(starts)
    }


def config_text(tags: Mapping[str, str]) -> str:
    """Return the JSON in the pieces of a run's `tags`; empty if there are none."""
    numbers = range(len(tags))
    return "".join(tags[name] for number in numbers if (name := f"{PREFIX}{number}") in tags)


def config_from_tags(tags: Mapping[str, str]) -> Config:
    """Return the configuration in a run's `tags`, with the default tracking.

    Raises:
        SpecError: if the tags have no configuration, or an incomplete one.

    """
    text = config_text(tags)
    if not text:
        raise SpecError(
            f"the run has no tag {PREFIX}0, so its configuration is unknown; name a run logged by "
            "this command, not the parent of a sweep"
        )
    try:
        document = json.loads(text)
    except ValueError as error:
        raise _damaged(f"they are not valid JSON: {error}") from error
    if not isinstance(document, dict):
        raise _damaged(f"they are a {type(document).__name__}, not sections")
    return config_from_document(document)


def _damaged(what: str) -> SpecError:
    return SpecError(
        f"the configuration that the run was logged with cannot be used: {what}; run it again from"
        " its overrides"
    )


def _plain(item: object) -> object:
    """Return `item` with mappings that survive JSON, which turns all keys into text."""
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
    """Return the dataclass `section` with `values`; `path` is its key prefix, for errors."""
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


def _value(hint: object, value: Any, path: str) -> object:  # noqa: ANN401 - whatever was logged
    """Return `value` converted to the type `hint` of a field."""
    if isinstance(hint, UnionType):  # with None
        if value is None:
            return None
        (hint,) = (kind for kind in get_args(hint) if kind is not NoneType)
    if isinstance(hint, type) and is_dataclass(hint):
        return _section(hint, value, f"{path}.")
    kind = get_origin(hint) or hint
    if kind is float and type(value) is int:
        try:
            return float(value)
        except OverflowError:
            raise _damaged(f"{path} is {str(value)[:20]}..., which is too large") from None
    # isinstance would accept True as an int.
    if kind is not Any and type(value) is not kind:
        name = kind.__name__ if isinstance(kind, type) else str(kind)
        raise _damaged(f"{path} is {value!r}, which is not of the type {name}")
    if kind is list:
        (inner,) = get_args(hint)
        return [_value(inner, item, f"{path}.{index}") for index, item in enumerate(value)]
    if kind is dict:
        _, inner = get_args(hint)
        return {key: _value(inner, item, f"{path}.{key}") for key, item in value.items()}
    return value
