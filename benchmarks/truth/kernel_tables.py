"""Tables of measured kernels in aiconfigurator's format: a parquet file per device and kind.

`read_kernels` and, for the tables of the installed package, `read_installed` read a table into the
arguments of the curves in `fxpart.cost.curves`. A hash of a row's label decides whether it is held
out of every fit: about half of the rows are, and the choice does not depend on the other rows of
the table.
"""

from collections.abc import Iterator
from errno import ENOENT
from pathlib import Path
from typing import Any, NamedTuple, Protocol
from zlib import crc32

import numpy as np
import numpy.typing as npt
from omegaconf import OmegaConf

from benchmarks.truth.row import Row
from fxpart.core.graph import FloatArray
from fxpart.core.topology import DeviceSpec
from fxpart.cost.curves.family import family_from
from fxpart.cost.curves.gemm import Rates
from fxpart.cost.curves.installed_tables import INSTALLED, InstalledTables, installed_folder
from fxpart.cost.curves.tables import measured_calls, rows_from_memory
from fxpart.errors import SpecError
from runner.config.paths import conf_dir
from runner.config.specs import accelerator_files, read_accelerator
from runner.experiment.measured_tables import package_tables

__all__ = [
    "DEVICES",
    "FAMILIES",
    "INSTALLED_DEVICES",
    "Curve",
    "Kernels",
    "is_held_out",
    "kernel_label",
    "kernel_rows",
    "read_installed",
    "read_kernels",
    "tables_if_installed",
]

_ACCELERATOR_OF = {"a100_sxm": "a100_80gb", "h100_sxm": "h100"}
_RUNS_IN = {"fp8": "float8_e4m3fn"}


def _device(accelerator: str) -> DeviceSpec:
    entry = read_accelerator(accelerator_files()[accelerator])
    return DeviceSpec(
        accelerator,
        entry["memory_bytes"],
        entry["flops_per_s"],
        entry["memory_bandwidth_bytes_per_s"],
        multiprocessors=entry["multiprocessors"],
        curves=entry["curves"],
    )


DEVICES = {prefix: _device(accelerator) for prefix, accelerator in _ACCELERATOR_OF.items()}
"""The measured device, by the prefix of its files' names."""
INSTALLED_DEVICES = {name: _device(name) for name in ("h200", "b200", "l40s")}
"""Other accelerators of which the package aiconfigurator-core has tables."""


FAMILIES = {
    name: family_from(name, curves)
    for name, curves in OmegaConf.load(conf_dir() / "latency" / "kernels.yaml").curves.items()
}
"""The shipped curves, by family of devices."""


class Kernels(NamedTuple):
    """Measured calls of one kind in one dtype."""

    calls: Any
    """`Products` or `Attentions`, by kind."""
    rates: Rates
    seconds: FloatArray
    labels: list[str]
    held_out: npt.NDArray[np.bool_]


class Curve(Protocol):
    """Anything that predicts the times of calls."""

    def seconds(self, calls: Any, rates: Rates) -> FloatArray:  # noqa: ANN401 - of its own kind
        """Return the time of each call."""
        ...


def kernel_rows(kernels: Kernels, curve: Curve) -> Iterator[Row]:
    """Yield a row for each measured call, with the prediction of `curve`."""
    predicted = curve.seconds(kernels.calls, kernels.rates)
    columns = (kernels.labels, predicted.tolist(), kernels.seconds.tolist(), kernels.held_out)
    for label, guess, seconds, held_out in zip(*columns, strict=True):
        yield Row(label, 1e6 * guess, 1e6 * seconds, "us", bool(held_out))


def kernel_label(*sizes: object) -> str:
    """Return the label of a measurement; its hash decides whether it is held out."""
    return " ".join(map(str, sizes))


def is_held_out(label: str) -> bool:
    """Return whether the measurement with that label is held out of fits: one of two is."""
    return crc32(label.encode()) % 2 == 1


def read_kernels(data: Path, prefix: str, kind: str, dtype: str) -> Kernels:
    """Return the rows of a device's table whose operands, or keys and values, are in `dtype`.

    Args:
        data: the folder that contains ``kernels``, the folder of the tables.
        prefix: key of `DEVICES`.
        kind: ``gemm``, ``context_attention`` or ``generation_attention``.
        dtype: the table's name of the dtype, such as ``bfloat16`` or ``fp8``.

    Raises:
        FileNotFoundError: if there is no such table.

    """
    path = data / "kernels" / f"{prefix}_{kind}.parquet"
    return _kernels(path, DEVICES[prefix], (prefix, kind, dtype))


def read_installed(accelerator: str, kind: str) -> Kernels:
    """Return the rows in 16 bits of the package's table of a device that were read from memory.

    Args:
        accelerator: key of `INSTALLED_DEVICES`.
        kind: ``gemm``, ``context_attention`` or ``generation_attention``.

    Raises:
        FileNotFoundError: if the package is not installed.

    """
    tables = tables_if_installed()
    system, path = tables.devices[accelerator].system, tables.files(accelerator)[kind].path
    kernels = _kernels(path, INSTALLED_DEVICES[accelerator], (system, kind, "bfloat16"))
    rows = rows_from_memory(kernels.calls, kernels.seconds, kernels.rates.bytes_per_s)
    return Kernels(
        kernels.calls.only(rows),
        kernels.rates,
        kernels.seconds[rows],
        [kernels.labels[row] for row in rows.tolist()],
        kernels.held_out[rows],
    )


def tables_if_installed() -> InstalledTables:
    """Return the tables of the package.

    Raises:
        FileNotFoundError: if it is not installed.

    """
    try:
        installed_folder()
    except SpecError as error:
        package = f"aiconfigurator-core (pip install 'fxpart[{INSTALLED}]')"
        raise FileNotFoundError(ENOENT, str(error), package) from error
    return package_tables()


def _kernels(path: Path, device: DeviceSpec, key: tuple[str, str, str]) -> Kernels:
    """Return the rows of a table; `key` is what was measured, the kind of table, and the dtype."""
    _, kind, dtype = key
    measured = measured_calls(path, kind, dtype)
    # Low-bit keys and values are multiplied in 16 bits.
    runs_in = _RUNS_IN.get(dtype, dtype) if kind == "gemm" else "bfloat16"
    rates = Rates(
        device.rate_for(runs_in), device.memory_bandwidth_bytes_per_s, device.multiprocessors
    )
    rows = zip(*measured.sizes.values(), strict=True)
    labels = [kernel_label(*key, *map(int, row)) for row in rows]
    held_out = np.array([is_held_out(label) for label in labels], dtype=np.bool_)
    return Kernels(measured.calls, rates, measured.seconds, labels, held_out)
