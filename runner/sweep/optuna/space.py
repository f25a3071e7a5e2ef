"""Optuna's search space: a dimension for each swept key, read from Hydra's syntax."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, cast

from fxpart.errors import SpecError
from runner.sweep.axes import Axis, read_axes

__all__ = ["Dimension", "Interval", "Space", "Steps", "keys_of", "read_space"]

_WHOLE = re.compile(r"interval\(\s*(?:start=)?[-+]?\d+\s*,\s*(?:end=)?[-+]?\d+\s*\)")
"""An interval between integers, which Hydra's parser turns into floats."""


_FUNCTION = re.compile(r"=.*\b(?:interval|range)\(")
"""Overrides that may be ranges of numbers; parsing them all would be slower."""

_DIGITS = 6
"""Significant digits of a proposed number, as shown in tables."""


@dataclass(frozen=True, slots=True)
class Interval:
    """All numbers from `low` to `high`, both included."""

    key: str
    low: float
    high: float
    whole: bool = False
    """Whether only integers are searched."""
    log: bool = False
    """Whether to search on a logarithmic scale."""

    def override(self, value: float) -> str:
        """Return the override that sets `value`, rounded to `_DIGITS`."""
        if self.whole:
            return f"{self.key}={int(value)}"
        return f"{self.key}={min(max(float(f'{value:.{_DIGITS}g}'), self.low), self.high)!r}"


@dataclass(frozen=True, slots=True)
class Steps:
    """Numbers of a range, in ascending order."""

    key: str
    values: tuple[str, ...]

    def override(self, value: float) -> str:
        """Return the override that sets the number at index `value`."""
        return f"{self.key}={self.values[int(value)]}"


Dimension = Interval | Steps | Axis
"""An `Axis` has unordered values: choices, and keys that change together."""


def keys_of(dimension: Dimension) -> tuple[str, ...]:
    """Return the keys that change along a dimension."""
    return dimension.keys if isinstance(dimension, Axis) else (dimension.key.lstrip("+"),)


@dataclass(frozen=True, slots=True)
class Space:
    """The fixed overrides and the searched dimensions."""

    fixed: tuple[str, ...]
    """The overrides of every job."""
    dimensions: tuple[Dimension, ...]

    def samples(self) -> list[tuple[str, ...]]:
        """Return the overrides of some jobs that together contain each listed value."""
        first = [
            dimension.low if isinstance(dimension, Interval) else 0 for dimension in self.dimensions
        ]
        jobs = [self.at(first)]
        for position, dimension in enumerate(self.dimensions):
            if not isinstance(dimension, Interval):
                others = range(1, len(dimension.values))
                jobs += [self.at([*first[:position], n, *first[position + 1 :]]) for n in others]
        return jobs

    def at(self, values: Sequence[float]) -> tuple[str, ...]:
        """Return the overrides of the job at `values`, one for each dimension.

        The value of an interval is the number itself, and that of other dimensions an index.
        """
        chosen = list(self.fixed)
        for dimension, value in zip(self.dimensions, values, strict=True):
            if isinstance(dimension, Axis):
                chosen += dimension.values[int(value)]
            else:
                chosen.append(dimension.override(value))
        return tuple(chosen)

    def size(self) -> int | None:
        """Return the number of combinations; None if it is infinite."""
        counts = [_count(dimension) for dimension in self.dimensions]
        return prod(n for n in counts if n) if all(counts) else None


def _count(dimension: Dimension) -> int | None:
    if isinstance(dimension, Interval):
        return int(dimension.high - dimension.low) + 1 if dimension.whole else None
    return len(dimension.values)


def read_space(
    overrides: Sequence[str],
    params: Mapping[str, object] | None,
    zips: Sequence[object] | None,
    config_loader: object,
) -> Space:
    """Return the search space of the command line and of ``hydra.sweeper.params`` (`params`).

    The command line takes precedence. Choices, ``glob`` and zipped keys are unordered values;
    ``interval`` and ``range`` are numbers.

    Raises:
        SpecError: if the sweep cannot be searched, or nothing is swept.

    """
    typed = {_key(text) for text in overrides}
    others = {key: value for key, value in (params or {}).items() if _key(key) not in typed}
    searched = {text: _numbers(text) for text in overrides}
    named = {key: _numbers(f"{key}={value}") for key, value in others.items()}
    numbers = [dimension for dimension in (*named.values(), *searched.values()) if dimension]
    _refuse_zipped([_key(number.key) for number in numbers], zips)
    fixed, axes = read_axes(
        [text for text, dimension in searched.items() if not dimension],
        {key: others[key] for key, dimension in named.items() if not dimension},
        zips,
        config_loader,
    )
    if not (axes or numbers):
        raise SpecError(
            "hydra/sweeper=optuna needs something to search; give a key several values, such as"
            " mode=kl_based,cost_aware or 'mode.min_gain=interval(1e-4,1e-1)'"
        )
    return Space(fixed, (*axes, *{_key(number.key): number for number in numbers}.values()))


def _key(override: str) -> str:
    return override.partition("=")[0].lstrip("+")


def _numbers(override: str) -> Interval | Steps | None:
    """Return the numbers that an override sweeps over; None for any other override."""
    if not _FUNCTION.search(override):
        return None
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    try:
        parsed = OverridesParser.create().parse_override(override)
    except HydraException:
        return None  # `read_axes` reports the error
    key, value = parsed.get_key_element(), parsed.value()
    if parsed.is_interval_sweep():
        return _interval(key, value, override)
    return _steps(key, value, override) if parsed.is_range_sweep() else None


def _interval(key: str, value: Any, override: str) -> Interval:  # noqa: ANN401
    low, high = value.start, value.end
    log = _is_log(value.tags, override)
    cast_to_float = "float(" in override
    whole = isinstance(low, int) or bool(_WHOLE.search(override) and not cast_to_float)
    if low > high:
        raise SpecError(f"{override}: {low} is more than {high}; give the lower end first")
    if log and low <= 0:
        raise SpecError(
            f"{override}: a logarithmic interval needs numbers above 0; start it above 0"
        )
    return Interval(key, int(low) if whole else low, int(high) if whole else high, whole, log)


def _steps(key: str, value: Any, override: str) -> Steps:  # noqa: ANN401
    if _is_log(value.tags, override):
        raise SpecError(
            f"{override}: a range with steps cannot be logarithmic; write "
            f"{key}=tag(log,int(interval(1,64)))"
        )
    numbers = sorted(value.range())
    if not numbers:
        raise SpecError(
            f"{override}: this range is empty, because its end is excluded; raise the end"
        )
    return Steps(key, tuple(str(number) for number in numbers))


def _is_log(tags: set[str], override: str) -> bool:
    unknown = sorted(tag for tag in tags if tag != "log")
    if unknown:
        raise SpecError(f"{override}: there is no tag {unknown[0]!r}; the only one is log")
    return "log" in tags


def _refuse_zipped(keys: Sequence[str], zips: Sequence[object] | None) -> None:
    for zipped in zips or ():
        for key in [zipped] if isinstance(zipped, str) else cast("Sequence[object]", zipped):
            if key in keys:
                raise SpecError(
                    f"zip: {key} is an interval or a range, which Optuna cannot change together"
                    f" with another key; list its values, such as {key}=1,2,4"
                )
