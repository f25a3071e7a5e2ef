"""Tables of measured kernels in the package aiconfigurator-core, where it is installed.

Only its data are read; the package itself is not imported. A table is the file
``systems/data/<system>/<group>/<backend>/<version>/<kind>_perf.parquet``, with the columns that
`fxpart.cost.curves.tables` reads from a folder of tables.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from packaging.version import InvalidVersion, Version

from fxpart.cost.curves.family import CurveFamily
from fxpart.cost.curves.gemm import Rates
from fxpart.cost.curves.tables import KINDS, Residuals, residuals_of_files
from fxpart.errors import SpecError

__all__ = ["INSTALLED", "InstalledTables", "MeasuredDevice", "TableFile", "installed_folder"]

INSTALLED = "aiconfigurator"
"""The value of ``latency.tables`` that means the installed package."""
_PACKAGE, _DISTRIBUTION = "aiconfigurator_core", "aiconfigurator-core"
_GROUP = {
    "gemm": "gemm",
    "context_attention": "attention",
    "generation_attention": "attention",
}
_BACKENDS = ("vllm", "sglang", "trtllm")
"""In order of preference. vLLM's products in 16 bits are those of `torch.nn.functional.linear`. The
shipped curves are fitted to its tables."""


class MeasuredDevice(NamedTuple):
    """The device on which the tables of a system were measured."""

    system: str
    """Name of its folder in the package, such as ``h200_sxm``."""
    rates: Rates
    """Its rates in bfloat16."""


class TableFile(NamedTuple):
    """A table of the package."""

    path: Path
    backend: str
    """The library whose kernels were measured, and its version, such as ``vllm 0.24.0``."""


def installed_folder() -> Path:
    """Return the folder of the installed package's tables, with a folder for each system.

    Raises:
        SpecError: if the package is not installed, or has no tables.

    """
    # Finding a top-level package does not import it.
    spec = find_spec(_PACKAGE)
    if spec is None:
        raise SpecError(
            f"latency.tables={INSTALLED} needs {_DISTRIBUTION}; pip install 'fxpart[{INSTALLED}]',"
            f" or write ./{INSTALLED} for a folder of that name"
        )
    folders = [Path(place, "systems", "data") for place in spec.submodule_search_locations or ()]
    for folder in folders:
        if folder.is_dir():
            return folder
    raise SpecError(
        f"latency.tables={INSTALLED}: the installed {_DISTRIBUTION} has no folder systems/data"
        f" (read: {', '.join(map(str, folders)) or spec.origin}); pip install"
        f" 'fxpart[{INSTALLED}]'"
    )


@dataclass(frozen=True, slots=True)
class InstalledTables:
    """The tables of the package, and the devices that they were measured on."""

    folder: Path
    devices: Mapping[str, MeasuredDevice]
    """By the name of an accelerator, in lower case."""

    def __str__(self) -> str:
        """Return the name that selects the package."""
        return INSTALLED

    def device(self, accelerator: str) -> MeasuredDevice | None:
        """Return the device whose tables an accelerator takes; None if it has none."""
        return self.devices.get(accelerator.lower())

    def files(self, accelerator: str) -> dict[str, TableFile]:
        """Return the tables of an accelerator by kind; empty if none was measured on it.

        For each kind that is the newest version of the first backend in the order of preference
        that has a table.

        Raises:
            SpecError: if the package has no table of the device's system.

        """
        if (measured := self.device(accelerator)) is None:
            return {}
        system = measured.system
        tables = {kind: table for kind in KINDS if (table := _newest(self.folder / system, kind))}
        if not tables:
            raise SpecError(
                f"latency.tables={INSTALLED} has no table of {system} ({accelerator}) in"
                f" {self.folder}; correct measured_system in the accelerator file, or"
                f" pip install -U 'fxpart[{INSTALLED}]'"
            )
        return tables

    def read(
        self,
        accelerator: str,
        family: str,
        curves: CurveFamily,
    ) -> dict[str, Residuals]:
        """Return the residuals of an accelerator's kernels by curve; empty if it has no tables.

        Raises:
            SpecError: if a table is missing or damaged.

        """
        if (measured := self.device(accelerator)) is None:
            return {}
        paths = {kind: table.path for kind, table in self.files(accelerator).items()}
        return residuals_of_files(paths, curves, measured.rates)

    def collectives(self, accelerator: str) -> TableFile:
        """Return the newest table of NCCL's collectives between devices of one kind.

        Raises:
            SpecError: if the package has none.

        """
        system = self.devices[accelerator].system
        table = _newest_of(self.folder / system / "comm" / "nccl", "nccl")
        if table is None:
            raise SpecError(
                f"{_DISTRIBUTION} has no table of NCCL on {system} ({accelerator}) in {self.folder}"
            )
        return table

    def label(self, accelerator: str, family: str) -> str:
        """Return the system and the backends of its tables: ``h200_sxm, vllm 0.24.0``.

        It is empty if the accelerator has no tables.
        """
        if (measured := self.device(accelerator)) is None:
            return ""
        backends = dict.fromkeys(table.backend for table in self.files(accelerator).values())
        return ", ".join([measured.system, *backends])


def _newest(system: Path, kind: str) -> TableFile | None:
    tables = (_newest_of(system / _GROUP[kind] / backend, kind) for backend in _BACKENDS)
    return next((table for table in tables if table), None)


def _newest_of(backend: Path, kind: str) -> TableFile | None:
    """Return the table of the newest version in the folder of a backend."""
    paths = backend.glob(f"*/{kind}_perf.parquet")
    versions = {path: version for path in paths if (version := _version(path.parent.name))}
    if not versions:
        return None
    newest = max(versions, key=lambda path: (versions[path], path.parent.name))
    return TableFile(newest, f"{backend.name} {newest.parent.name}")


def _version(name: str) -> Version | None:
    try:
        return Version(name)
    except InvalidVersion:
        return None
