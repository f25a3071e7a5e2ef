"""Tables of measured collectives: bytes, ranks and times."""

from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from benchmarks.truth.kernel_tables import is_held_out, kernel_label, tables_if_installed
from fxpart.core.graph import FloatArray
from fxpart.cost.collectives import COLLECTIVES, wire_bytes
from fxpart.cost.curves.tables import read_columns

__all__ = [
    "INSTALLED_LINK_BYTES_PER_S",
    "KINDS",
    "LINK_BYTES_PER_S",
    "Messages",
    "read_installed_messages",
    "read_messages",
]

KINDS = {name.replace("_to_", "to"): name for name in COLLECTIVES}
"""Kinds of collectives by their names in the tables."""
LINK_BYTES_PER_S = {"a100_sxm": 300e9, "h100_sxm": 450e9}
"""One-way rates of NVLink 3 and 4."""
INSTALLED_LINK_BYTES_PER_S = {"h200": 450e9, "b200": 900e9, "l40s": 31.5e9}
"""One-way rates of the links of the package's devices: NVLink 4 and 5, and PCIe 4.0."""
_ELEMENT_BYTES = {"half": 2, "int8": 1}


class Messages(NamedTuple):
    """Measured collectives of one kind."""

    wire: FloatArray
    """Bytes that each rank sends."""
    size: FloatArray
    """Bytes of the whole tensor at one rank."""
    ranks: FloatArray
    bytes_per_s: float
    seconds: FloatArray
    labels: list[str]
    held_out: npt.NDArray[np.bool_]


def read_messages(data: Path, prefix: str, kind: str) -> Messages:
    """Return the rows of that kind in a device's NCCL table.

    Raises:
        FileNotFoundError: if there is no such table.

    """
    path = data / "kernels" / f"{prefix}_nccl.parquet"
    return _messages(path, prefix, kind, LINK_BYTES_PER_S[prefix])


def read_installed_messages(accelerator: str, kind: str) -> Messages:
    """Return the rows of that kind in the package's newest NCCL table of a device.

    Args:
        accelerator: key of `INSTALLED_LINK_BYTES_PER_S`.
        kind: value of `KINDS`.

    Raises:
        FileNotFoundError: if the package is not installed.

    """
    tables = tables_if_installed()
    system, path = tables.devices[accelerator].system, tables.collectives(accelerator).path
    return _messages(path, system, kind, INSTALLED_LINK_BYTES_PER_S[accelerator])


def _messages(path: Path, measured_on: str, kind: str, link_bytes_per_s: float) -> Messages:
    columns = read_columns(path)
    chosen = np.array([KINDS[name] == kind for name in columns["op_name"].tolist()])
    columns = {name: column[chosen] for name, column in columns.items()}
    dtypes, elements = columns["nccl_dtype"].tolist(), columns["message_size"]
    size = elements.astype(np.float64) * [_ELEMENT_BYTES[dtype] for dtype in dtypes]
    ranks = columns["num_gpus"].astype(np.float64)
    wire = np.array([wire_bytes(kind, *message) for message in zip(size, ranks, strict=True)])
    rows = zip(dtypes, columns["num_gpus"].tolist(), elements.tolist(), strict=True)
    labels = [kernel_label(measured_on, kind, *row) for row in rows]
    held_out = np.array([is_held_out(label) for label in labels], dtype=np.bool_)
    seconds = columns["latency"] * 1e-3
    return Messages(wire, size, ranks, link_bytes_per_s, seconds, labels, held_out)
