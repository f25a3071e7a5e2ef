"""Options of modes: dataclasses filled from the configuration, with checks."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, TypeVar

from fxpart.errors import SpecError, nearest_names

__all__ = ["NoOptions", "read_options"]

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class NoOptions:
    """The options of modes without any."""


def read_options(options_class: type[_T], mode: str, options: object) -> _T:
    """Return `options_class` filled from `options`, a mapping or already an instance.

    Raises:
        SpecError: if an option does not exist, or its value has the wrong type.

    """
    if isinstance(options, options_class):
        return options
    if not isinstance(options, Mapping):
        raise SpecError(
            f"the options of mode {mode} must be a mapping of names to values, or"
            f" {options_class.__name__}, got {options!r}"
        )
    known = {f.name: f for f in fields(options_class)}  # type: ignore[arg-type]
    filled: dict[str, Any] = dict(options)
    for name, value in options.items():
        if name not in known:
            near = nearest_names(name, known) if known else "it takes none"
            raise SpecError(f"mode {mode} has no option {name!r}; {near}")
        expected = known[name].type
        if expected is float and type(value) is int:
            filled[name] = float(value)
        elif isinstance(expected, type) and type(value) is not expected:
            raise SpecError(
                f"mode.{name} must be of type {expected.__name__}, got {value!r};"
                f" change it or leave it out"
            )
    return options_class(**filled)
