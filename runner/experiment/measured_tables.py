"""The tables of measured kernels that ``latency.tables`` names: a folder, or the package's."""

from pathlib import Path

from fxpart.cost.curves.gemm import Rates
from fxpart.cost.curves.installed_tables import (
    INSTALLED,
    InstalledTables,
    MeasuredDevice,
    installed_folder,
)
from fxpart.errors import SpecError
from runner.config.sections import Config, LatencyConfig
from runner.config.specs import accelerator_files, read_accelerator

__all__ = ["check_tables", "installed_tables", "table_paths", "tables_of"]


def tables_of(latency: LatencyConfig) -> Path | InstalledTables | None:
    """Return the folder or the package that ``latency.tables`` names; None without any.

    Raises:
        SpecError: if there is no such folder, or the package is not installed.

    """
    if not latency.tables:
        return None
    if latency.tables == INSTALLED:
        return installed_tables()
    folder = Path(latency.tables)
    if not folder.is_dir():
        raise SpecError(
            f"latency.tables={folder} is not a folder; name a folder of measured tables, or"
            f" {INSTALLED} for the installed package"
        )
    return folder


def installed_tables() -> InstalledTables:
    """Return the package's tables, with the accelerators whose files name one of its systems.

    Raises:
        SpecError: if the package is not installed, or an accelerator file is invalid.

    """
    files = accelerator_files()
    entries = {name: read_accelerator(path) for name, path in files.items()}
    devices = {}
    for name, entry in entries.items():
        # The peaks of the file, not those of a run's devices, which may differ from what was
        # measured.
        measured_name = str(entry.get("measured_as") or name)
        if measured_name not in entries:
            raise SpecError(
                f"accelerator file {files[name]}: measured_as={measured_name} is no accelerator"
            )
        measured = entries[measured_name]
        if system := measured.get("measured_system"):
            rates = measured["flops_per_s"]
            devices[name] = MeasuredDevice(
                str(system),
                Rates(
                    rates.get("bfloat16") or rates["float32"],
                    measured["memory_bandwidth_bytes_per_s"],
                    measured.get("multiprocessors") or 100,
                ),
            )
    return InstalledTables(installed_folder(), devices)


def check_tables(config: Config) -> None:
    """Raise `SpecError` if tables are missing, or the package has none for any device."""
    tables = tables_of(config.latency)
    if not isinstance(tables, InstalledTables):
        return
    names = list(dict.fromkeys(pool.name for pool in config.devices.pools))
    found = [tables.files(name) for name in names]
    if not any(found):
        raise SpecError(
            f"latency.tables={INSTALLED} has no tables of {', '.join(names)}, only of"
            f" {', '.join(tables.devices)}; leave it out, or state measured_system in the"
            " accelerator file"
        )


def table_paths(config: Config) -> list[tuple[str, Path]]:
    """Return the files that times depend on, each with a name that does not depend on its folder.

    Raises:
        SpecError: as `check_tables`.

    """
    tables = tables_of(config.latency)
    if tables is None:
        return []
    if isinstance(tables, Path):
        return [(path.name, path) for path in sorted(tables.glob("*.parquet"))]
    names = dict.fromkeys(pool.name for pool in config.devices.pools)
    paths = [table.path for name in names for table in tables.files(name).values()]
    return [(path.relative_to(tables.folder).as_posix(), path) for path in paths]
