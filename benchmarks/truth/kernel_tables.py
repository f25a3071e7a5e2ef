"""Tables of measured kernels, as aiconfigurator keeps them: a parquet file by device and kind."""

from errno import ENOENT
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fxpart.core.topology import DeviceSpec
from runner.config.specs import accelerator_files, read_accelerator

__all__ = ["DEVICES", "read_columns"]
_ACCELERATOR_OF = {"a100_sxm": "a100_80gb", "h100_sxm": "h100"}


def _device(accelerator: str) -> DeviceSpec:
    entry = read_accelerator(accelerator_files()[accelerator])
    return DeviceSpec(
        accelerator,
        entry["memory_bytes"],
        entry["flops_per_s"],
        entry["memory_bandwidth_bytes_per_s"],
    )


DEVICES = {prefix: _device(accelerator) for prefix, accelerator in _ACCELERATOR_OF.items()}
"""By how its files' names begin, the device that they were measured on."""


def read_columns(path: Path) -> dict[str, npt.NDArray[Any]]:
    """Return the columns of a table; `latency` is in ms.

    Raises:
        FileNotFoundError: where there is no such file.

    """
    import pyarrow.parquet

    if not path.is_file():
        raise FileNotFoundError(ENOENT, "there is no table", str(path))
    read = pyarrow.parquet.read_table(path)
    return {name: np.array(read[name].to_pylist()) for name in read.column_names}
