"""The values of a job by their names in ``where=``."""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import fields, is_dataclass

from fxpart.errors import nearest_names
from runner.config.schema import Config
from runner.job.identity import ALIKE_IN_ALL_JOBS, Choices

__all__ = ["look_up", "open_names", "why_unknown"]


def _memory_bytes(config: Config) -> int:
    return sum(pool.count * pool.memory_bytes for pool in config.devices.pools)


_GB = 10**9
_CHOICES = tuple(field.name for field in fields(Choices))
_DERIVED: Mapping[str, Callable[[Config], float]] = {
    "n_devices": lambda config: sum(pool.count for pool in config.devices.pools),
    "memory_bytes": _memory_bytes,
    "memory_gb": lambda config: _memory_bytes(config) / _GB,
}
"""Values over all devices."""
_OPEN = ("model.config.", "model.factory_args.")
"""Sections whose keys depend on the model."""
_MODE = "mode"
_MOST_MEANT = 3
"""Most names in a suggestion."""


def why_unknown(name: str, extra_names: Collection[str] = ()) -> str | None:
    """Return the error for an unknown `name`, in one line; None if jobs have such a value.

    `extra_names` are the `open_names` of the jobs, for suggestions.
    """
    section, _, inside = name.partition(".")
    if not inside:
        known = _bare_names()
        wrong, suggestion = f"{name} does not exist", nearest_names(name, known)
        is_known = name in known
    elif section == _MODE:
        known = ["name", *_mode_options()]
        wrong, suggestion = f"{name} is not an option of any mode", nearest_names(inside, known)
        is_known = inside in known
    else:
        known = _dotted_names()
        wrong, suggestion = f"{name} does not exist", nearest_names(name, known)
        is_known = name in known or name.startswith(_OPEN)
    return None if is_known else f"{wrong}; {_meant(name, extra_names) or suggestion}"


def _meant(name: str, extra_names: Collection[str]) -> str:
    """Return a question suggesting the names with the same last part; empty for none."""
    last = name.rpartition(".")[2]
    modes = [f"{_MODE}.{option}" for option in _mode_options()]
    known = dict.fromkeys([*extra_names, *_dotted_names(), *modes])
    near = [candidate for candidate in known if candidate.rpartition(".")[2] == last]
    shown = [*near[:_MOST_MEANT], *(["..."] if len(near) > _MOST_MEANT else [])]
    return f"did you mean {' or '.join(shown)}?" if near else ""


def open_names(configs: Iterable[Config]) -> list[str]:
    """Return the names of the values in sections whose keys depend on the model."""
    names: dict[str, None] = {}
    for config in configs:
        for path in _OPEN:
            values: object = config
            for key in path.rstrip(".").split("."):
                values = getattr(values, key)
            assert isinstance(values, Mapping), "what is open is a mapping"
            names |= dict.fromkeys(_below(values, path))
    return list(names)


def _below(values: Mapping[object, object], path: str) -> list[str]:
    names = []
    for key, value in values.items():
        inner = _below(value, f"{path}{key}.") if isinstance(value, Mapping) else []
        names += inner or [f"{path}{key}"]
    return names


def look_up(name: str, config: Config, choices: Choices) -> object:
    """Return the value of a known name; None if this job has no such value.

    A bare name is a choice, such as ``pcie4`` for `transfer_rate`; a dotted one is a value of the
    configuration.
    """
    if name in _CHOICES:
        return getattr(choices, name)
    if name in _DERIVED:
        return _DERIVED[name](config)
    section, *inside = name.split(".")
    value: object = getattr(config, section)
    if section == _MODE:
        value = {"name": config.mode.name, **config.mode.options}
    elif not inside:
        return getattr(value, "name", value)
    for key in inside:
        value = _member(value, key)
    return value


def _member(value: object, key: str) -> object:
    if isinstance(value, Mapping):
        return value.get(key)
    return vars(value).get(key) if is_dataclass(value) else None


def _bare_names() -> list[str]:
    """Return the names of choices, derived values, and settings outside of sections."""
    names = [*_CHOICES, *_DERIVED]
    for name, value in vars(Config()).items():
        has_name = is_dataclass(value) and hasattr(value, "name")
        if has_name or isinstance(value, str | int | float):
            names.append(name)
    return [name for name in dict.fromkeys(names) if name not in ALIKE_IN_ALL_JOBS]


def _dotted_names() -> list[str]:
    return [name for field in fields(Config) for name in _inside(field.type, field.name)]


def _inside(kind: object, path: str) -> list[str]:
    """Return the names below `path`, except those in lists of sections and open mappings."""
    if path in ALIKE_IN_ALL_JOBS or not (isinstance(kind, type) and is_dataclass(kind)):
        return []
    names = []
    for field in fields(kind):
        name, inner = f"{path}.{field.name}", (field.type, *getattr(field.type, "__args__", ()))
        if dict in inner or getattr(field.type, "__origin__", None) is not None:
            continue
        below = [nested for part in inner for nested in _inside(part, name)]
        names += below or [name]
    return names


def _mode_options() -> list[str]:
    from fxpart.placement import MODES

    names = [field.name for options, _ in MODES.values() for field in fields(options)]
    return list(dict.fromkeys(names))
