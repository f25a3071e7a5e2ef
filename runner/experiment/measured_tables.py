"""The tables of measured kernels that ``latency.tables`` names: a folder, or the package's."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fxpart.cost.curves.gemm import Rates
from fxpart.cost.curves.installed_tables import (
    INSTALLED,
    InstalledTables,
    MeasuredDevice,
    installed_folder,
)
from fxpart.cost.curves.tables import FolderTables, MeasuredTables
from fxpart.errors import SpecError
from runner.config.device_schema import PoolConfig
from runner.config.schema import Config, LatencyConfig
from runner.config.specs import accelerator_files, read_accelerator

__all__ = ["check_tables", "package_tables", "table_paths", "tables_of"]


def tables_of(latency: LatencyConfig) -> FolderTables | InstalledTables | None:
    """Return the folder or the package that ``latency.tables`` names; None without any.

    Raises:
        SpecError: if there is no such folder, or the package is not installed.

    """
    if not latency.tables:
        return None
    if latency.tables == INSTALLED:
        return package_tables()
    folder = Path(latency.tables)
    if not folder.is_dir():
        raise SpecError(
            f"latency.tables={folder} is not a folder; name a folder of measured tables, or"
            f" {INSTALLED} for the installed package"
        )
    return FolderTables(folder)


def package_tables() -> InstalledTables:
    """Return the package's tables, with the accelerators whose files name one of its systems.

    Raises:
        SpecError: if the package is not installed, or an accelerator file is invalid.

    """
    files = accelerator_files()
    entries = {name: read_accelerator(path) for name, path in files.items()}
    devices = {}
    for name, entry in entries.items():
        measured = entry
        if borrowed := entry.get("measured_as"):
            measured = entries.get(str(borrowed), {})
            if "measured_system" not in measured:
                raise SpecError(
                    f"accelerator file {files[name]}: measured_as={borrowed} is no accelerator"
                    " with a measured_system"
                )
        if system := measured.get("measured_system"):
            devices[name] = MeasuredDevice(str(system), _rates(files[name], measured))
    return InstalledTables(installed_folder(), devices)


def _rates(path: Path, entry: dict[str, Any]) -> Rates:
    """Return the peaks in an accelerator file: a run's devices may differ from what was measured.

    Raises:
        SpecError: if it states none in 16 bits.

    """
    rates = entry["flops_per_s"]
    if "bfloat16" not in rates or "multiprocessors" not in entry:
        raise SpecError(
            f"accelerator file {path}: measured_system needs flops_per_s.bfloat16 and"
            " multiprocessors"
        )
    bytes_per_s = entry["memory_bandwidth_bytes_per_s"]
    return Rates(rates["bfloat16"], bytes_per_s, entry["multiprocessors"])


def check_tables(tables: MeasuredTables | None, all_pools: Sequence[PoolConfig]) -> None:
    """Raise `SpecError` if the package has no tables of any device, or of one without curves."""
    if not isinstance(tables, InstalledTables):
        return
    pools = [pool for pool in all_pools if tables.files(pool.name)]
    if without_curves := [pool.name for pool in pools if not pool.curves]:
        raise SpecError(
            f"latency.tables={INSTALLED} corrects curves, and {', '.join(without_curves)} has none;"
            " state curves in the accelerator file, or leave the tables out"
        )
    if not pools:
        names = dict.fromkeys(pool.name for pool in all_pools)
        raise SpecError(
            f"latency.tables={INSTALLED} has no tables of {', '.join(names)}, only of"
            f" {', '.join(tables.devices)}; leave it out, or state measured_system in the"
            " accelerator file"
        )


def table_paths(config: Config) -> list[tuple[str, Path]]:
    """Return the files that times depend on, and for each what else decides how it is used.

    These texts do not depend on the folder. For the package they name the pool and the rates at
    which its tables were measured, since neither is among the numbers of a device.

    Raises:
        SpecError: as `tables_of`, or if the package lacks the tables of a device.

    """
    tables = tables_of(config.latency)
    if tables is None:
        return []
    if isinstance(tables, FolderTables):
        return [(path.name, path) for path in sorted(tables.folder.glob("*.parquet"))]
    paths = []
    for number, pool in enumerate(config.devices.pools):
        for table in tables.files(pool.name).values():
            name = table.path.relative_to(tables.folder).as_posix()
            paths.append((f"pool {number}, {tables.device(pool.name)}: {name}", table.path))
    return paths
