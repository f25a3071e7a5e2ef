"""Parse specs: ``4x16gb`` or ``2xh100`` as devices, ``25gbit`` as a transfer rate.

A size stands for an accelerator in the table ``conf/accelerator``, which has a YAML file for each.
"""

import math
import re
from collections.abc import Mapping
from contextlib import suppress
from copy import deepcopy
from functools import lru_cache
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError  # type: ignore[import-untyped]

from fxpart.core.device_spec import (
    DEVICE_GRAMMAR,
    MAX_DEVICES,
    PoolSpec,
    parse_devices,
    parse_size_bytes,
)
from fxpart.core.efficiency import efficiency_from
from fxpart.errors import SpecError, nearest_names, show_bytes
from fxpart.support.host import available_cores, host_memory_bytes
from fxpart.support.regular_file import regular_status
from runner.config.paths import conf_dir, user_conf_dir
from runner.errors import message_of

__all__ = [
    "HOST_LAUNCH_S",
    "TIER_FOLDER",
    "TRANSFER_GRAMMAR",
    "accelerator_files",
    "device_pools",
    "looks_like_rate",
    "machines_in",
    "read_accelerator",
    "tiers_in",
    "transfer_rate",
]

TIER_FOLDER = "tier"
"""The folder of ``conf/`` that defines host and disk tiers in specs; not a config group."""
_CLASS_BYTES = 2**30
"""A card sold as 16 GB has up to 16 GiB, so 16gib is of the same class as 16gb."""
_CLASS_LINE = re.compile(r"^stands_for_gb:[ \t]+([1-9]\d*(?:\.\d+)?)(?:[ \t]+#.*)?$", re.MULTILINE)
_NEEDED = ("memory", "flops_per_s", "memory_bandwidth_bytes_per_s", "source")
_RATES = ("flops_per_s", "sustained_flops_per_s")
"""Rates by dtype, of which the second is optional."""
_IF_GIVEN = ("stands_for_gb", "multiprocessors", "nvlink_bytes_per_s", "price_per_hour")
_OR_ZERO = ("host_launch_s", "power_w")
"""Other numbers in an accelerator file that may be 0."""
_SWITCHES = ("on_host", "per_core", "own_curves")
_OTHERS = ("efficiency", "curves", "measured_system", "measured_as")
HOST_LAUNCH_S = 29e-6
"""Time of the host to launch an operator if the file does not state it; fitted by `python -m
benchmarks.truth.fit_host`."""


def accelerator_files() -> dict[str, Path]:
    """Return the file of each accelerator by name, shipped ones and the working directory's."""
    folders = [folder / "accelerator" for folder in (user_conf_dir(), conf_dir()) if folder]
    # For the same name the shipped file takes precedence, as in config groups.
    return {path.stem.lower(): path for folder in folders for path in sorted(folder.glob("*.yaml"))}


def read_accelerator(path: Path) -> dict[str, Any]:
    """Return the content of an accelerator file, with `memory_bytes` in place of `memory`.

    Raises:
        SpecError: if the file cannot be read, or a value is missing or invalid.

    """
    try:
        stat = regular_status(path)
    except OSError as error:
        raise SpecError(f"accelerator file {path} cannot be read: {error}") from error
    entry = _read_file(path, (stat.st_mtime_ns, stat.st_size))
    return {**entry, **{key: dict(entry[key]) for key in _RATES if key in entry}}


@lru_cache(maxsize=256)
def _read_file(path: Path, state: tuple[int, int]) -> dict[str, Any]:
    """Return the content of a file, cached for sweeps; `state` changes with the file."""
    try:
        table = OmegaConf.to_container(OmegaConf.load(path))
    # ValueError covers text that is not UTF-8.
    except (OmegaConfBaseException, YAMLError, OSError, ValueError, RecursionError) as error:
        raise SpecError(f"accelerator file {path} cannot be read: {message_of(error)}") from error
    values = table if isinstance(table, dict) else {}
    missing = [key for key in _NEEDED if key not in values]
    if missing:
        raise SpecError(
            f"accelerator file {path} does not set {', '.join(missing)}; see the files of "
            "conf/accelerator"
        )
    known = (*_NEEDED, *_RATES, *_IF_GIVEN, *_OR_ZERO, *_SWITCHES, *_OTHERS)
    for key in map(str, values):
        if key not in known:
            raise SpecError(
                f"accelerator file {path}: {key} does not exist; {nearest_names(key, known)}"
            )
    try:
        memory_bytes = _memory_bytes(str(values["memory"]))
    except SpecError as error:
        raise SpecError(f"accelerator file {path}: {error}") from error
    entry = {str(key): value for key, value in values.items() if key != "memory"}
    _check_numbers(path, entry)
    _check_efficiency(path, entry.get("efficiency", {}))
    return {**entry, "memory_bytes": memory_bytes}


def _memory_bytes(memory: str) -> int:
    return host_memory_bytes() if memory == "host" else parse_size_bytes(memory)


def _check_numbers(path: Path, entry: Mapping[str, Any]) -> None:
    numbers: dict[str, Any] = {}
    for key in (key for key in _RATES if key in entry):
        rates = entry[key]
        if not isinstance(rates, Mapping) or not rates:
            raise SpecError(
                f"accelerator file {path}: {key} is {rates!r}; give a rate for each dtype,"
                " such as float32: 19.5e12"
            )
        numbers |= {f"{key}.{dtype}": rate for dtype, rate in rates.items()}
    for key in _SWITCHES:
        if not isinstance(entry.get(key, False), bool):
            raise SpecError(
                f"accelerator file {path}: {key} must be true or false, is {entry[key]!r}"
            )
    numbers["memory_bandwidth_bytes_per_s"] = entry["memory_bandwidth_bytes_per_s"]
    numbers |= {key: entry[key] for key in _IF_GIVEN if entry.get(key) is not None}
    numbers |= {key: entry[key] for key in _OR_ZERO if entry.get(key)}
    for key, number in numbers.items():
        # bool is a subclass of int.
        plain = isinstance(number, int | float) and not isinstance(number, bool)
        if not plain or not 0 < number < math.inf:
            raise SpecError(
                f"accelerator file {path}: {key} must be a positive number, is {number!r}"
            )


def _check_efficiency(path: Path, shares: object) -> None:
    if not isinstance(shares, Mapping):
        raise SpecError(
            f"accelerator file {path}: efficiency is {shares!r}; give shares of the peaks by kind"
            " of operator, such as gemm: {bfloat16: 0.7}"
        )
    try:
        efficiency_from(shares)
    except SpecError as error:
        raise SpecError(f"accelerator file {path}: {error}") from error


def device_pools(spec: str, asked: str = "") -> list[dict[str, Any]]:
    """Return the pools of `spec`, with numbers from the table of accelerators.

    Errors show `asked`, if that has tiers too.

    A size stands for the accelerator of the smallest memory class that is large enough, or of the
    largest class, with the memory of the spec.

    Raises:
        SpecError: if the spec cannot be parsed, or the file of one of its accelerators is invalid.

    """
    files = accelerator_files()
    pools = parse_devices(spec, files, asked)
    is_sized = any(pool.accelerator is None for pool in pools)
    classes = _classes(files) if is_sized else {}
    found = []
    for pool in pools:
        name = pool.accelerator or _of_class(pool.memory_bytes or 0, classes)
        found.append((pool, name, read_accelerator(files[name])))
    shares = sum(pool.count for pool, _, entry in found if _is_share(pool, entry))
    return [
        _share(_pool(pool, name, entry), shares if _is_share(pool, entry) else 1)
        for pool, name, entry in found
    ]


_MACHINES = re.compile(r"(\d{1,4})x(\d+x.+)", re.IGNORECASE)


def machines_in(spec: str, asked: str = "") -> tuple[str, list[int] | None]:
    """Return `spec` with the devices of each machine written out, and the machine of each pool.

    In ``2x8xh100+4xa10`` there are two machines of eight devices and one of four. Without a number
    of machines all devices are in one, and there is no list. Errors show `asked`.

    Raises:
        SpecError: if there are no machines, or more of them than devices are allowed.

    """
    pools: list[str] = []
    are_counted = False
    for part in spec.split("+"):
        match = _MACHINES.fullmatch(part.strip())
        count, pool = (int(match[1]), match[2]) if match else (1, part)
        if not 0 < count <= MAX_DEVICES - len(pools):
            raise SpecError(
                f"devices={asked or spec}: there must be 1 to {MAX_DEVICES} machines; write"
                f" {DEVICE_GRAMMAR}"
            )
        pools += [pool] * count
        are_counted |= match is not None
    return "+".join(pools), list(range(len(pools))) if are_counted and len(pools) > 1 else None


def _is_share(pool: PoolSpec, entry: Mapping[str, Any]) -> bool:
    """Return whether a pool named the host, which is shared by all such pools."""
    return pool.accelerator is not None and bool(entry.get("on_host"))


def _share(pool: dict[str, Any], shares: int) -> dict[str, Any]:
    """Return a pool of the host itself with one of `shares` of its memory and cores."""
    if shares == 1:
        return pool
    return {
        **pool,
        **{key: {dtype: rate / shares for dtype, rate in pool[key].items()} for key in _RATES},
        "memory_bytes": max(1, pool["memory_bytes"] // shares),
        "memory_bandwidth_bytes_per_s": pool["memory_bandwidth_bytes_per_s"] / shares,
        "source": f"{pool['source']}; one of {shares} shares",
    }


def _pool(pool: PoolSpec, name: str, entry: Mapping[str, Any]) -> dict[str, Any]:
    memory_bytes, note = pool.memory_bytes, ""
    if memory_bytes and memory_bytes != entry["memory_bytes"]:
        note = f"; memory {show_bytes(memory_bytes)} as asked for"
    cores = available_cores() if entry.get("per_core") else 1
    if cores > 1:
        note += f"; times {cores} cores"
    return {
        "count": pool.count,
        "name": name,
        "memory_bytes": memory_bytes or entry["memory_bytes"],
        **{
            key: {dtype: rate * cores for dtype, rate in entry.get(key, {}).items()}
            for key in _RATES
        },
        "memory_bandwidth_bytes_per_s": entry["memory_bandwidth_bytes_per_s"] * cores,
        "on_host": entry.get("on_host", False),
        "multiprocessors": entry.get("multiprocessors") or 100,
        "curves": entry.get("curves", ""),
        "own_curves": entry.get("own_curves", False),
        "host_launch_s": _launch_s(entry),
        "power_w": float(entry.get("power_w") or 0.0),
        "efficiency": deepcopy(entry.get("efficiency", {})),
        "nvlink_bytes_per_s": entry.get("nvlink_bytes_per_s"),
        "price_per_hour": entry.get("price_per_hour"),
        "source": f"{entry['source']}{note}",
    }


def _launch_s(entry: Mapping[str, Any]) -> float:
    stated = entry.get("host_launch_s")
    if stated is None:
        return 0.0 if entry.get("on_host") else HOST_LAUNCH_S
    return float(stated)


def _of_class(memory_bytes: int, classes: Mapping[int, str]) -> str:
    """Return the accelerator that a size stands for."""
    at_least = [size for size in classes if size >= memory_bytes]
    return classes[min(at_least) if at_least else max(classes)]


def _classes(files: Mapping[str, Path]) -> dict[int, str]:
    """Return the accelerator of each memory class, by its bytes."""
    stated = {name: _stated_class_gb(path) for name, path in files.items()}
    return {round(size_gb * _CLASS_BYTES): name for name, size_gb in stated.items() if size_gb}


def _stated_class_gb(path: Path) -> float | None:
    """Return the ``stands_for_gb`` of an accelerator file, if any.

    Without parsing the file if possible: to parse all of them takes a tenth of ``--help``.
    """
    with suppress(OSError):  # raised again with the file's name
        regular_status(path)
        text = path.read_text(encoding="utf-8", errors="replace")
        if "stands_for_gb" not in text:
            return None
        if line := _CLASS_LINE.search(text):
            return float(line[1])
    stated: float | None = read_accelerator(path).get("stands_for_gb")
    return stated


# Tiers.

_TIER = re.compile(r"(?:(\d+)x)?(host|nvme)([-.]?\d[\w.]*)")
_NAMED_SIZE = re.compile(r"(?:\d+x)?(([a-z_]+)[-.]?(\d[\d.]*[mgt]i?b))")
_KINDS = {"host": "host", "nvme": "disk"}


def tiers_in(spec: str) -> tuple[str, list[dict[str, Any]]]:
    """Return `spec` without its tiers, such as ``host64gb`` and ``nvme500gb``, and the tiers.

    Raises:
        SpecError: if a tier has a count, an invalid size or an unknown name, or there are only
            tiers.

    """
    parts = [part.strip() for part in spec.lower().split("+")]
    matches = [_TIER.fullmatch(part) for part in parts]
    tiers = [_tier(spec, part, match) for part, match in zip(parts, matches, strict=True) if match]
    devices = [part for part, match in zip(parts, matches, strict=True) if not match]
    if tiers and not devices:
        raise SpecError(
            f"devices={spec} has only tiers, which store weights of devices; add a device, such as "
            f"1x24gb+{spec}"
        )
    for part in devices:
        named = _NAMED_SIZE.fullmatch(part)
        if named and named[1] not in accelerator_files():
            raise SpecError(
                f"devices={spec}: {named[2]!r} is neither an accelerator nor a tier"
                f" ({', '.join(_KINDS)}); a size alone, such as {named[3]}, is a device"
            )
    return ("+".join(devices) if tiers else spec), tiers


def _tier(spec: str, part: str, match: re.Match[str]) -> dict[str, Any]:
    count, name, size = match.groups()
    if count is not None:
        raise SpecError(f"devices={spec}: {part} is one tier; write {name}{size}")
    try:
        memory_bytes = parse_size_bytes(size)
    except SpecError as error:
        raise SpecError(f"devices={spec}: {part}: {error}") from None
    entry = OmegaConf.to_container(OmegaConf.load(conf_dir() / TIER_FOLDER / f"{name}.yaml"))
    assert isinstance(entry, dict)
    return {"name": part, "kind": _KINDS[name], "memory_bytes": memory_bytes, **entry}


# Transfer rates.

TRANSFER_GRAMMAR = (
    "a rate one way, in bytes per second such as 16gb or 16e9, or in bits per second such as 25gbit"
)
"""The syntax of transfer rates, for messages and help."""
_HOW = f"write {TRANSFER_GRAMMAR}"
_RATE = re.compile(r"([-+]?(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?)([a-z/]*)")
_PER_S = {
    "": 1.0,
    "mb": 1e6,
    "gb": 1e9,
    "tb": 1e12,
    "mbit": 1e6 / 8,
    "gbit": 1e9 / 8,
    "tbit": 1e12 / 8,
}
_LEAST_PLAIN = 1e6
"""Bytes per second: for a smaller number without a unit, the unit was probably forgotten."""
_LATENCY_S = 10e-6


def looks_like_rate(name: str) -> bool:
    """Return whether `name` starts like a rate, so that a message about rates helps."""
    return bool(re.match(r"[-+]?\.?\d", name))


def transfer_rate(spec: str) -> dict[str, Any]:
    """Return ``{name, bytes_per_s, latency_s, source}`` of the rate `spec`.

    Raises:
        SpecError: if the unit is unknown or seems forgotten, or the rate is not positive and
            finite.

    """
    match = _RATE.fullmatch(spec.strip().lower())
    if match is None or match[2] not in _PER_S:
        units = ", ".join(unit for unit in _PER_S if unit)
        shown = " ".join(spec.split())
        raise SpecError(f"transfer_rate={shown}: not a number with one of {units}, or bare; {_HOW}")
    bytes_per_s = float(match[1]) * _PER_S[match[2]]
    if not 0 < bytes_per_s < math.inf:
        raise SpecError(f"transfer_rate={spec}: the rate must be positive and finite; {_HOW}")
    if not match[2] and bytes_per_s < _LEAST_PLAIN:
        raise SpecError(
            f"transfer_rate={spec} has no unit, and would be {bytes_per_s:g} bytes per second;"
            f" write {match[1]}gb or {match[1]}gbit"
        )
    return {
        "name": spec,
        "bytes_per_s": bytes_per_s,
        "latency_s": _LATENCY_S,
        "source": "rate as asked for; latency assumed",
    }
