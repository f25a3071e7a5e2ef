"""The table of accelerators, one YAML file each, and what a size in a spec stands for."""

import math
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError  # type: ignore[import-untyped]

from fxpart.core.device_spec import PoolSpec, parse_devices, parse_size_bytes
from fxpart.errors import SpecError, show_bytes
from runner.config.paths import conf_dir, user_conf_dir

__all__ = ["accelerator_files", "device_pools", "read_accelerator"]

_CLASS_BYTES = 2**30
"""A card sold as 16 GB holds up to 16 GiB: 16gib is of the same class as 16gb."""
_NEEDED = ("memory", "flops_per_s", "memory_bandwidth_bytes_per_s", "source")


def accelerator_files() -> dict[str, Path]:
    """Return the file of each accelerator by name: shipped ones, then the working directory's."""
    folders = [folder / "accelerator" for folder in (user_conf_dir(), conf_dir()) if folder]
    # Where both have a name, the shipped file wins, as in every other group.
    return {path.stem.lower(): path for folder in folders for path in sorted(folder.glob("*.yaml"))}


def read_accelerator(path: Path) -> dict[str, Any]:
    """Return what an accelerator's file says, with `memory_bytes` in place of `memory`.

    Raises:
        SpecError: for a file that is damaged or does not say all that is needed.

    """
    try:
        stat = path.stat()
    except OSError as error:
        raise SpecError(f"accelerator file {path} cannot be read: {error}") from error
    entry = _read(path, (stat.st_mtime_ns, stat.st_size))
    return {**entry, "flops_per_s": dict(entry["flops_per_s"])}


@lru_cache(maxsize=256)
def _read(path: Path, state: tuple[int, int]) -> dict[str, Any]:
    """Return what the file says; `state` changes with it. A sweep asks for the same many times."""
    try:
        table = OmegaConf.to_container(OmegaConf.load(path))
    except (OmegaConfBaseException, YAMLError, OSError) as error:
        said = " ".join(str(error).split())
        raise SpecError(f"accelerator file {path} cannot be read: {said}") from error
    given = table if isinstance(table, dict) else {}
    missing = [key for key in _NEEDED if key not in given]
    if missing:
        raise SpecError(
            f"accelerator file {path} does not state {', '.join(missing)};"
            " see the files of conf/accelerator"
        )
    try:
        memory_bytes = parse_size_bytes(str(given["memory"]))
    except SpecError as error:
        raise SpecError(f"accelerator file {path}: {error}") from error
    entry = {str(key): value for key, value in given.items() if key != "memory"}
    _check_numbers(path, entry)
    return {**entry, "memory_bytes": memory_bytes}


def _check_numbers(path: Path, entry: Mapping[str, Any]) -> None:
    rates = entry["flops_per_s"]
    if not isinstance(rates, Mapping) or not rates:
        raise SpecError(
            f"accelerator file {path}: flops_per_s is {rates}; give a rate for each dtype, such as"
            " float32: 19.5e12"
        )
    if not isinstance(entry.get("on_host", False), bool):
        raise SpecError(
            f"accelerator file {path}: on_host must be true or false, is {entry['on_host']}"
        )
    numbers = {f"flops_per_s.{dtype}": rate for dtype, rate in rates.items()}
    numbers["memory_bandwidth_bytes_per_s"] = entry["memory_bandwidth_bytes_per_s"]
    if entry.get("stands_for_gb") is not None:
        numbers["stands_for_gb"] = entry["stands_for_gb"]
    for key, number in numbers.items():
        # True is an int to Python.
        plain = isinstance(number, int | float) and not isinstance(number, bool)
        if not plain or not 0 < number < math.inf:
            raise SpecError(
                f"accelerator file {path}: {key} must be a positive number, is {number}"
            )


def device_pools(spec: str) -> list[dict[str, Any]]:
    """Return the pools that `spec` names, with numbers from the table of accelerators.

    A size stands for the accelerator of the smallest memory class that is not smaller, or of the
    largest class, with the memory that the spec gives.

    Raises:
        SpecError: for a spec that cannot be read.

    """
    files = accelerator_files()
    pools = parse_devices(spec, files)
    sized = any(pool.accelerator is None for pool in pools)
    needed = files if sized else [pool.accelerator for pool in pools if pool.accelerator]
    table = {name: read_accelerator(files[name]) for name in needed}
    return [_resolve(pool, table) for pool in pools]


def _resolve(pool: PoolSpec, table: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    name, memory_bytes = pool.accelerator, pool.memory_bytes
    if name is None:
        name = _stand_in(memory_bytes or 0, table)
    note = ""
    if memory_bytes and memory_bytes != table[name]["memory_bytes"]:
        note = f"; memory {show_bytes(memory_bytes)} as asked for"
    entry = table[name]
    return {
        "count": pool.count,
        "name": name,
        "memory_bytes": memory_bytes or entry["memory_bytes"],
        "flops_per_s": dict(entry["flops_per_s"]),
        "memory_bandwidth_bytes_per_s": entry["memory_bandwidth_bytes_per_s"],
        "on_host": entry.get("on_host", False),
        "source": f"{entry['source']}{note}",
    }


def _stand_in(memory_bytes: int, table: Mapping[str, Mapping[str, Any]]) -> str:
    classes = {
        round(entry["stands_for_gb"] * _CLASS_BYTES): name
        for name, entry in table.items()
        if entry.get("stands_for_gb")
    }
    at_least = [size for size in classes if size >= memory_bytes]
    return classes[min(at_least) if at_least else max(classes)]
