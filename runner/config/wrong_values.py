"""What of a configuration file does not fit the sections that the configuration has."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from omegaconf import BooleanNode, FloatNode, IntegerNode, StringNode
from omegaconf.errors import ValidationError

from fxpart.errors import nearest_names
from runner.config.passwords import without_password
from runner.config.paths import conf_dir

__all__ = ["unknown_key", "wrong_value"]

_READERS: dict[object, tuple[Callable[[object], object], str]] = {
    bool: (BooleanNode, "must be true or false"),
    int: (IntegerNode, "must be a whole number"),
    float: (FloatNode, "must be a number"),
    str: (StringNode, "must be text"),
}
"""OmegaConf's own reading of what a file may hold, and what it takes."""
_MOST_SHOWN = 80
"""Characters of a value."""


def wrong_value(values: Mapping[Any, Any], section: type, path: str = "") -> str | None:
    """Return what is wrong with the first of `values` that `section` does not take, None if all do.

    `values` are those of a file, unresolved; `section` is the dataclass of what stands at `path`.
    References to other values, ``${...}``, are taken for right.
    """
    known = get_type_hints(section)
    for key, value in values.items():
        here = f"{path}.{key}" if path else str(key)
        if key not in known:
            return _unknown(here, str(key), known, value)
        said = _mismatch(value, known[key], here)
        if said:
            return said
    return None


def unknown_key(path: str) -> str:
    """Return what to write instead of a key that the configuration does not have."""
    from runner.config.sections import Config

    known = {field.name: field.type for field in fields(Config)}
    section, _, key = path.partition(".")
    if section == "hydra":  # what there is depends on the launcher and the sweeper chosen
        package = path.rpartition(".")[0]
        return f"{path} does not exist; --cfg hydra --package {package} shows what does"
    inside = known.get(section)
    if not key or inside is None or not hasattr(inside, "__dataclass_fields__"):
        # A key that stands in a section, asked for without it: saturate_host.
        homes = [
            f"{name}.{section}"
            for name, kind in known.items()
            if section in getattr(kind, "__dataclass_fields__", {})
        ]
        near = f"did you mean {homes[0]}?" if homes else nearest_names(section, known)
        return f"{path} does not exist; {near}"
    near = nearest_names(key, inside.__dataclass_fields__)
    return f"{path} does not exist; in {section}, {near}"


def _unknown(path: str, key: str, known: Mapping[str, Any], value: object) -> str:
    above, _, _ = path.removesuffix(key).rpartition(".")
    if "." in key:
        first, _, rest = key.rpartition(".")
        nested = ": {".join([*first.split("."), f"{rest}: {_shown(value)}"])
        return f"{path} has a dot; in a file write {nested}{'}' * key.count('.')}"
    if not above or above.partition(".")[0] == "hydra":
        return unknown_key(path)
    if above == key:
        return f"{path} does not exist; leave out `{key}:`, all of the file is that section"
    return f"{path} does not exist; in {above}, {nearest_names(key, known)}"


def _mismatch(value: object, kind: object, path: str) -> str | None:
    if kind is Any or (isinstance(value, str) and (value == "???" or "${" in value)):
        return None
    if get_origin(kind) in (Union, UnionType):
        inside = [one for one in get_args(kind) if one is not NoneType]
        is_optional = len(inside) < len(get_args(kind))
        only = inside[0] if len(inside) == 1 else Any
        return None if value is None and is_optional else _mismatch(value, only, path)
    if value is None:
        return f"{path} needs a value, null is none"
    if is_dataclass(kind) or get_origin(kind) is dict:
        return _of_mapping(value, kind, path)
    return (_of_list if get_origin(kind) is list else _of_scalar)(value, kind, path)


def _of_mapping(value: object, kind: object, path: str) -> str | None:
    if not isinstance(value, Mapping):
        return _not_a_mapping(value, kind, path)
    if is_dataclass(kind):
        assert isinstance(kind, type)
        return wrong_value(value, kind, path)
    said = (_mismatch(one, get_args(kind)[1], f"{path}.{key}") for key, one in value.items())
    return next((one for one in said if one), None)


def _not_a_mapping(value: object, kind: object, path: str) -> str:
    asked = f"{path}: {_shown(value)}"
    group = path.replace(".", "/")
    if isinstance(value, str) and (conf_dir() / group).is_dir():
        return f"{asked} is a choice; write it in defaults: `- override /{group}: {_shown(value)}`"
    if is_dataclass(kind):
        names = ", ".join(one.name for one in fields(kind))
        return f"{asked} must be several values; there are: {names}"
    return f"{asked} must be several values; write {path.rpartition('.')[2]}: {{name: value}}"


def _of_list(value: object, kind: object, path: str) -> str | None:
    if not isinstance(value, Sequence) or isinstance(value, str):
        return f"{path}: {_shown(value)} must be a list, such as [...]"
    said = (_mismatch(one, get_args(kind)[0], f"{path}.{index}") for index, one in enumerate(value))
    return next((one for one in said if one), None)


def _of_scalar(value: object, kind: object, path: str) -> str | None:
    if isinstance(kind, type) and issubclass(kind, Enum):
        names = [one.name for one in kind]
        return None if value in names else f"{path}: {_shown(value)} must be {' or '.join(names)}"
    if kind not in _READERS:
        return None
    reader, meaning = _READERS[kind]
    try:
        reader(value)
    except ValidationError:
        return f"{path}: {_shown(value)} {meaning}{_in_bytes(value, path)}"
    return None


def _in_bytes(value: object, path: str) -> str:
    """Return the number that a size with a unit stands for."""
    from fxpart.core.device_spec import parse_size_bytes
    from fxpart.errors import SpecError

    if not path.endswith("_bytes") or not isinstance(value, str):
        return ""
    try:
        return f", such as {parse_size_bytes(value)}"
    except SpecError:
        return ""


def _shown(value: object) -> str:
    text = " ".join(without_password(str(value)).split())
    return text if len(text) <= _MOST_SHOWN else f"{text[: _MOST_SHOWN - 3]}..."
