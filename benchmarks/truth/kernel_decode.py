"""Measured fused attention of decodes, compared with the curves of `conf/latency/kernels.yaml`."""

from collections.abc import Iterator
from pathlib import Path

from benchmarks.truth.kernel_tables import DEVICES, FAMILIES, kernel_rows, read_kernels
from benchmarks.truth.row import Row

__all__ = ["NAME", "SOURCE", "rows"]

NAME = "attention of single tokens, 16 bits"
SOURCE = "ai-dynamo/aiconfigurator, systems data (Apache-2.0), A100 and H100 SXM"


def rows(data: Path) -> Iterator[Row]:
    """Yield a row for each call with a cache of bfloat16."""
    for prefix, device in DEVICES.items():
        kernels = read_kernels(data, prefix, "generation_attention", "bfloat16")
        yield from kernel_rows(kernels, FAMILIES[device.curves].decode)
