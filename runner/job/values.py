"""The values of a job by the names that ``where=`` knows them by, and what is no part of a job."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass

from fxpart.errors import nearest_names
from runner.config.sections import Config
from runner.job.identity import Choices, without_elsewhere

__all__ = ["OF_THE_SWEEP", "deciding", "for_jobs", "look_up", "open_names", "why_unknown"]


def _memory_bytes(config: Config) -> int:
    return sum(pool.count * pool.memory_bytes for pool in config.devices.pools)


_GB = 10**9
_CHOICES = tuple(field.name for field in fields(Choices))
_DERIVED: Mapping[str, Callable[[Config], float]] = {
    "n_devices": lambda config: sum(pool.count for pool in config.devices.pools),
    "memory_bytes": _memory_bytes,
    "memory_gb": lambda config: _memory_bytes(config) / _GB,
}
"""Of all devices together."""
OF_THE_SWEEP = ("question", "resume", "where", "zip", "rerun")
"""What is asked of a sweep, and is nothing to a job of it."""
_THE_SAME = (*OF_THE_SWEEP, "tracking", "figures", "verbose")
"""What all jobs share, and no result depends on."""
_OPEN = ("model.config.", "model.factory_args.")
"""Whose names the model decides."""
_MODE = "mode"
_MOST_MEANT = 3
"""As many names as a question has."""


def for_jobs(overrides: Sequence[str]) -> tuple[str, ...]:
    """Return the overrides that the jobs of a sweep are composed with."""
    return without_elsewhere(overrides, OF_THE_SWEEP)


def deciding(overrides: Sequence[str]) -> tuple[str, ...]:
    """Return the overrides that decide results: those that make a sweep another one."""
    return without_elsewhere(overrides, (*_THE_SAME, "hydra"))


def why_unknown(name: str, more: Collection[str] = ()) -> str | None:
    """Return what is wrong with `name`, in one line; None when jobs have such a value.

    `more` are `open_names` of the jobs, which may be what is meant.
    """
    section, _, inside = name.partition(".")
    if not inside:
        known = _bare_names()
        wrong, near = f"{name} does not exist", nearest_names(name, known)
        is_known = name in known
    elif section == _MODE:
        known = ["name", *_mode_options()]
        wrong, near = f"{name} is an option of no mode", nearest_names(inside, known)
        is_known = inside in known
    else:
        known = _dotted_names()
        wrong, near = f"{name} does not exist", nearest_names(name, known)
        is_known = name in known or name.startswith(_OPEN)
    return None if is_known else f"{wrong}; {_meant(name, more) or near}"


def _meant(name: str, more: Collection[str]) -> str:
    """Return the names whose last part is that of `name`, as a question; ``""`` for none."""
    last = name.rpartition(".")[2]
    modes = [f"{_MODE}.{option}" for option in _mode_options()]
    known = dict.fromkeys([*more, *_dotted_names(), *modes])
    found = [one for one in known if one.rpartition(".")[2] == last]
    shown = [*found[:_MOST_MEANT], *(["..."] if len(found) > _MOST_MEANT else [])]
    return f"did you mean {' or '.join(shown)}?" if found else ""


def open_names(configs: Iterable[Config]) -> list[str]:
    """Return the names of values that the models of these jobs decide."""
    found: dict[str, None] = {}
    for config in configs:
        for path in _OPEN:
            values: object = config
            for key in path.rstrip(".").split("."):
                values = getattr(values, key)
            assert isinstance(values, Mapping), "what is open is a mapping"
            found |= dict.fromkeys(_below(values, path))
    return list(found)


def _below(values: Mapping[object, object], path: str) -> list[str]:
    names = []
    for key, value in values.items():
        inner = _below(value, f"{path}{key}.") if isinstance(value, Mapping) else []
        names += inner or [f"{path}{key}"]
    return names


def look_up(name: str, config: Config, choices: Choices) -> object:
    """Return the value of a name that is known; None where this job has no such value.

    A bare name is the choice made, such as ``pcie4`` for `transfer_rate`; a dotted one is a value
    of the configuration.
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
    """Return the choices, what follows from them, and the settings that stand in no section."""
    found = [*_CHOICES, *_DERIVED]
    for name, value in vars(Config()).items():
        has_name = is_dataclass(value) and hasattr(value, "name")
        if has_name or isinstance(value, str | int | float):
            found.append(name)
    return [name for name in dict.fromkeys(found) if name not in _THE_SAME]


def _dotted_names() -> list[str]:
    return [one for field in fields(Config) for one in _inside(field.type, field.name)]


def _inside(kind: object, path: str) -> list[str]:
    """Return the names below `path`, but for lists of sections and open mappings."""
    if path in _THE_SAME or not (isinstance(kind, type) and is_dataclass(kind)):
        return []
    names = []
    for field in fields(kind):
        name, inner = f"{path}.{field.name}", (field.type, *getattr(field.type, "__args__", ()))
        if dict in inner or getattr(field.type, "__origin__", None) is not None:
            continue
        below = [found for one in inner for found in _inside(one, name)]
        names += below or [name]
    return names


def _mode_options() -> list[str]:
    from fxpart.placement import MODES

    options = [field.name for known, _ in MODES.values() for field in fields(known)]
    return list(dict.fromkeys(options))
