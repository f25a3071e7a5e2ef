"""The axes of a sweep: overrides with several values; zipped keys share an axis."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fxpart.errors import SpecError, nearest_names
from runner.cli.mistakes import unreadable_override
from runner.config.choices import quoted_overrides

if TYPE_CHECKING:
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.core.override_parser.types import Override

__all__ = ["Axis", "read_axes"]

_PARAMS = "hydra.sweeper.params"


@dataclass(frozen=True, slots=True)
class Axis:
    """Keys that change together, usually one, and their values."""

    keys: tuple[str, ...]
    """The keys of the configuration, without prefixes such as ``+``."""
    values: tuple[tuple[str, ...], ...]
    """The distinct values, each with an override per key."""


def read_axes(
    overrides: Sequence[str],
    params: Mapping[str, object] | None,
    zips: Sequence[object] | None,
    config_loader: object,
) -> tuple[tuple[str, ...], tuple[Axis, ...]]:
    """Return the overrides shared by all jobs, and the axes in order of appearance.

    Args:
        overrides: the command line.
        params: values by key from a configuration file, as a list or as typed. They come first, and
            `overrides` of the same key replace them.
        zips: the keys that share an axis, or several lists of such keys.
        config_loader: Hydra's, to expand ``glob(*)``.

    Raises:
        SpecError: if values cannot be enumerated, a key has none, or keys cannot be zipped.

    """
    from hydra.core.override_parser.overrides_parser import OverridesParser

    parser = OverridesParser.create(config_loader=config_loader)  # type: ignore[arg-type]
    parsed = parser.parse_overrides(list(overrides))
    typed = [override.get_key_element().lstrip("+") for override in parsed]
    # As in Hydra, the last value of a repeated key counts, at the position of the first.
    last: dict[str, Override] = {}
    for override in [*_of_params(params or {}, typed, parser), *parsed]:
        last[override.get_key_element()] = override
    fixed = tuple(
        str(override.input_line) for override in last.values() if not override.is_sweep_override()
    )
    overrides_of: dict[str, list[str]] = {}
    for override in last.values():
        if override.is_sweep_override():
            key = override.get_key_element().lstrip("+")
            if key in overrides_of:
                raise SpecError(f"{key} is swept twice, with + and without; leave one out")
            overrides_of[key] = _values(override)
    return fixed, _zipped(overrides_of, _zip_lists(zips))


def _of_params(
    params: Mapping[str, object], typed: Sequence[str], parser: "OverridesParser"
) -> list["Override"]:
    """Return the overrides from a configuration file, except for keys that were `typed`."""
    from hydra.errors import HydraException

    parsed = []
    for key, value in params.items():
        if str(key).lstrip("+") in typed:
            continue
        (text,) = quoted_overrides([f"{key}={_as_typed(str(key), value, parser)}"])
        try:
            parsed += parser.parse_overrides([text])
        except HydraException as error:
            raise SpecError(f"{_PARAMS}: {unreadable_override(text, str(error))}") from error
        if parsed[-1].is_sweep_override() and parsed[-1].is_hydra_override():
            raise SpecError(f"{_PARAMS}: {key} is Hydra's own and cannot be swept; leave it out")
    return parsed


def _as_typed(key: str, value: object, parser: "OverridesParser") -> str:
    """Return `value`, from a file, as it would be typed; a list becomes several values."""
    if not isinstance(value, list | tuple):
        return value if isinstance(value, str) else _one_as_typed(value, parser)
    if not value:
        raise SpecError(f"{_PARAMS}: {key} is an empty list; give it values or leave it out")
    return ",".join(_one_as_typed(item, parser) for item in value)


def _one_as_typed(value: object, parser: "OverridesParser") -> str:
    from hydra.core.override_parser.types import Override, Quote, QuotedString
    from hydra.errors import HydraException

    if isinstance(value, str):
        try:
            if parser.parse_override(f"key={value}").value() == value:
                return value
        except HydraException:
            pass  # it needs quotes
        return str(QuotedString(value, Quote.single).with_quotes())
    return str(Override._get_value_element_as_str(value))  # type: ignore[arg-type]


def _values(override: "Override") -> list[str]:
    """Return an override for each value of a swept override."""
    if not override.is_discrete_sweep():
        raise SpecError(
            f"{override.input_line}: a grid needs a finite list of values, not an interval; write "
            "a=1,2,4 or a=range(1,9), or use hydra/sweeper=optuna"
        )
    key = override.get_key_element()
    values = [f"{key}={value}" for value in override.sweep_string_iterator()]
    if not values:
        raise SpecError(f"{override.input_line} has no values; give it some or leave it out")
    return values


def _zip_lists(zips: Sequence[object] | None) -> list[list[str]]:
    """Return the lists of keys that share an axis."""
    keys_or_lists: list[Any] = list(zips or [])
    lists = (
        keys_or_lists
        if any(isinstance(item, list | tuple) for item in keys_or_lists)
        else [keys_or_lists]
    )
    for keys in lists:
        if not isinstance(keys, list | tuple) or not all(isinstance(key, str) for key in keys):
            raise SpecError(
                f"zip={_shown(keys_or_lists)} is neither a list of keys nor of such lists; write"
                " zip=[mode,devices] or zip=[[mode,devices],[microbatches,schedule]]"
            )
    return [list(keys) for keys in lists if keys]


def _shown(zips: object) -> str:
    if isinstance(zips, list | tuple):
        return f"[{','.join(_shown(item) for item in zips)}]"
    return str(zips)


def _zipped(
    overrides_of: Mapping[str, list[str]], lists: Sequence[Sequence[str]]
) -> tuple[Axis, ...]:
    """Return the axes; one with several keys is at the position of the first."""
    partners: dict[str, Sequence[str]] = {}
    for keys in lists:
        _check_zip(keys, overrides_of)
        for key in keys:
            if key in partners:
                raise SpecError(f"zip={_shown(lists)}: {key} appears twice; leave one out")
            partners[key] = keys
    axes, zipped = [], set()
    for key in overrides_of:
        if key in zipped:
            continue
        keys = sorted(partners.get(key, [key]), key=list(overrides_of).index)
        zipped.update(keys)
        rows = zip(*(overrides_of[key] for key in keys), strict=True)
        axes.append(Axis(tuple(keys), tuple(dict.fromkeys(rows))))
    return tuple(axes)


def _check_zip(keys: Sequence[str], overrides_of: Mapping[str, list[str]]) -> None:
    for key in keys:
        if key not in overrides_of:
            suggestion = nearest_names(key, overrides_of) if overrides_of else "no key is"
            raise SpecError(f"zip={_shown(keys)}: {key} is not swept; {suggestion}")
    lengths = {key: len(overrides_of[key]) for key in keys}
    if len(set(lengths.values())) > 1:
        counts = ", ".join(f"{key} has {count}" for key, count in lengths.items())
        raise SpecError(
            f"zip={_shown(keys)} needs as many values of each key; {counts}; add or leave out some"
        )
