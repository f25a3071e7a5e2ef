"""Turn OmegaConf's errors about keys, values and references into one line.

Only its exceptions' types, public attributes and messages are used.
"""

import re
from dataclasses import fields, is_dataclass
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import (
    ConfigAttributeError,
    ConfigKeyError,
    GrammarParseError,
    InterpolationResolutionError,
    OmegaConfBaseException,
)

from fxpart.core.device_spec import parse_size_bytes
from fxpart.errors import SpecError, nearest_names
from runner.config import device_schema, schema
from runner.config.passwords import without_password
from runner.config.paths import conf_dir

__all__ = ["refused_by_omegaconf", "typed_key", "unknown_key"]

_MOST_WRITTEN = 1e15
"""Largest number to write out in digits."""
_LONGEST_VALUE = 80
"""Most characters of a value to show."""
_SECTIONS: dict[str, Any] = {
    name: getattr(module, name)
    for module in (schema, device_schema)
    for name in module.__all__
    if name.endswith("Config")
}
"""The classes of sections by name."""


def refused_by_omegaconf(error: OmegaConfBaseException, override: str = "") -> str:
    """Return the error in one line, starting with the key or the `override` at fault.

    Without `override` the value is in a file. Passwords are removed.
    """
    if isinstance(error, InterpolationResolutionError | GrammarParseError):
        return _broken_reference(error)
    if isinstance(error, ConfigKeyError | ConfigAttributeError):
        return _unknown_in_section(error)
    return _wrong_value(error, override)


def typed_key(error: OmegaConfBaseException) -> str:
    """Return the key of `error` as it is typed: ``a.0.b`` for OmegaConf's ``a[0].b``."""
    return re.sub(r"\[(\d+)\]", r".\1", error.full_key or "")


# Keys.


def unknown_key(path: str) -> str | None:
    """Return an error for an unknown key `path`, with advice; None if it exists."""
    section, _, key = path.partition(".")
    if section == "hydra":  # its keys depend on the launcher and the sweeper chosen
        package = path.rpartition(".")[0] or section
        return f"{path} does not exist; --cfg hydra --package {package} shows what does"
    known = {field.name: field.type for field in fields(schema.Schema)}
    names = _field_names(known.get(section))
    if path in known or key in names:
        return None
    if key and names:
        return f"{path} does not exist; in {section}, {nearest_names(key, names)}"
    # A key may be typed without its section: saturate_host.
    homes = [name for name, kind in known.items() if section in _field_names(kind)]
    suggestion = f"did you mean {homes[0]}.{section}?" if homes else nearest_names(section, known)
    return f"{path} does not exist; {suggestion}"


def _field_names(kind: object) -> list[str]:
    return [field.name for field in fields(kind)] if is_dataclass(kind) else []


def _unknown_in_section(error: OmegaConfBaseException) -> str:
    path, key, section = typed_key(error), str(error.key), error.object_type
    above = path.removesuffix(key).rstrip(".")
    if "." in key:
        nested = f"{key.replace('.', ': {')}: ...{'}' * key.count('.')}"
        return f"{path} has a dot; in a file write {nested}"
    if above == key:
        return f"{path} does not exist; leave out `{key}:`, all of the file is that section"
    if path.startswith("hydra") or section is schema.Schema or not is_dataclass(section):
        return unknown_key(path) or f"{path} does not exist here"
    # Inside a list, OmegaConf knows the key but not the path of the list.
    inside = f"in {above}, " if above else ""
    return f"{path} does not exist; {inside}{nearest_names(key, _field_names(section))}"


# Values.

_WHOLE = "must be a whole number"
_MEANINGS = (
    (r"is not a valid bool", "must be true or false"),
    (r"could not be converted to Integer", _WHOLE),
    (r"could not be converted to Float", "must be a number"),
    (r"to string", "must be text"),
    (r"is not Optional|Incompatible value 'None'", "needs a value, got null"),
    (r"expected one of \[(.*)\]", "must be one of {0}"),
    (r"does not support deletion", "cannot be deleted; set another value"),
)
"""OmegaConf's messages about values, with our wording."""


def _wrong_value(error: OmegaConfBaseException, override: str) -> str:
    message = str(error).partition("\n")[0]
    key = typed_key(error)
    value = _shown_value(error, message)
    if override:
        setting = without_password(override)
        # The error is about one value inside a list or a mapping.
        if key != override.partition("=")[0].lstrip("+~"):
            setting = f"{setting}: {value}"
    else:
        setting = f"{key}: {value}" if key else value
    for pattern, meaning in _MEANINGS:
        match = re.search(pattern, message)
        if match:
            hint = _as_integer(key, error.value) if meaning == _WHOLE else ""
            return f"{setting} {meaning.format(*match.groups())}{hint}"
    if "is not a ListConfig" in message:
        return (
            f"{setting} must be a list, such as {key}=[{'mode,devices' if key == 'zip' else '...'}]"
        )
    several = re.search(r"is not a subclass of (\w+)|Cannot assign", message)
    class_name = (several and several[1]) or ""
    if several and (key or class_name in _SECTIONS):
        return _needs_several(setting, key, value, class_name)
    if class_name.endswith("LauncherConf"):
        message += "; a launcher is chosen in defaults: `- override /hydra/launcher: joblib`"
    return f"{key}: {without_password(message)}" if key else without_password(message)


def _needs_several(setting: str, key: str, value: str, class_name: str) -> str:
    """Return the error for a single value in place of a section, whose class may be known."""
    section = _SECTIONS.get(class_name)
    if not key:  # while merging whole files, the error names only the class
        known = fields(schema.Schema)
        key = next((field.name for field in known if section and field.type is section), "")
        setting = f"{key}: {value}" if key else setting
    if "=" not in setting and key and (conf_dir() / key).is_dir() and value[:1] not in ("[", "{"):
        return f"{setting} is a choice; write it in defaults: `- override /{key}: {value}`"
    names = _field_names(section)
    hint = f"there are: {', '.join(names)}" if names else f"write {key}={{name: value}}"
    return f"{setting} must be several values; {hint}"


def _shown_value(error: OmegaConfBaseException, message: str) -> str:
    in_message = re.search(r"value: (.*)", message)
    value = in_message[1] if error.value is None and in_message else error.value
    text = " ".join(without_password("null" if value is None else str(value)).split())
    return text if len(text) <= _LONGEST_VALUE else f"{text[: _LONGEST_VALUE - 3]}..."


def _as_integer(key: str, value: object) -> str:
    """Return a hint with the bytes of a size with a unit, or the digits of ``1e9``."""
    if isinstance(value, float) and abs(value) < _MOST_WRITTEN and value.is_integer():
        return f" without point or exponent: {int(value)}"
    if not key.endswith("_bytes") or not isinstance(value, str):
        return ""
    try:
        return f", such as {parse_size_bytes(value)}"
    except SpecError:
        return ""


# References, ``${section.key}``.

_REFERENCES = (
    (
        r"key 'hydra\.runtime\.choices\.(\w+)' not found",
        "needs one choice of {0}; write {0}=..., and no list and no ~",
    ),
    (r"Interpolation key '([^']*)' not found", "refers to {0}, which does not exist"),
    (
        r"Environment variable '([^']+)' not found",
        "needs the environment variable {0}; set it, or write ${{oc.env:{0},default}}",
    ),
    (
        r"Unsupported interpolation type ([\w.]+)",
        "asks for ${{{0}:...}}, which does not exist; write ${{section.key}} or ${{oc.env:NAME}}",
    ),
    (r"[Rr]ecursi", "refers to itself; write a value"),
    (
        r"(?:resolving|dereferencing) interpolation\b[^:]*: ([^\n]*)",
        "cannot be resolved ({0}); correct it",
    ),
    (
        r"(.*(?:input|at) '.*)",
        "has a reference that cannot be read ({0}); write ${{section.key}}",
    ),
)
"""OmegaConf's messages about references, with our wording."""


def _broken_reference(error: OmegaConfBaseException) -> str:
    message = str(error).partition("\n    full_key")[0]
    line = without_password(message)
    for pattern, meaning in _REFERENCES:
        match = re.search(pattern, message)
        if match:
            line = meaning.format(*map(without_password, match.groups()))
            break
    missing = re.fullmatch(r"refers to (?!hydra)(.+), which does not exist", line)
    if missing:
        line += (unknown_key(missing[1]) or "").partition(" does not exist")[2]
    text = _unresolved_text(error)
    value = f"={without_password(text)}" if text else ""
    return f"{typed_key(error) or 'a value'}{value} {line}"


def _unresolved_text(error: OmegaConfBaseException) -> str:
    """Return the value with the reference as written; empty if unknown."""
    if isinstance(error.value, str):
        return error.value
    if not OmegaConf.is_config(error.parent_node):
        return ""
    node: object = OmegaConf.to_container(error.parent_node, resolve=False)
    for name in str(error.key).split("."):
        if isinstance(node, list) and name.isdigit():
            node = node[int(name)]
        else:
            node = node.get(name) if isinstance(node, dict) else None
    return node if isinstance(node, str) else ""
