"""Matrix products by m, n, k and dtype, beside the roofline of `conf/latency/roofline.yaml`."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from benchmarks.truth.kernel_tables import DEVICES, read_columns
from benchmarks.truth.row import Row

__all__ = ["NAME", "SOURCE", "rows"]

NAME = "kernels: matrix products"
SOURCE = "ai-dynamo/aiconfigurator, systems data (Apache-2.0), A100 and H100 SXM"


def rows(data: Path) -> Iterator[Row]:
    """Yield a row for each product; nothing was fitted to them."""
    for name, device in DEVICES.items():
        columns = read_columns(data / "kernels" / f"{name}_gemm.parquet")
        m, n, k = (columns[size].astype(np.float64) for size in "mnk")
        few_bits = np.char.startswith(columns["gemm_dtype"].astype(str), "fp8")
        rate = np.where(few_bits, device.rate_for("float8_e4m3fn"), device.rate_for("bfloat16"))
        operand = np.where(few_bits, 1, 2)
        moved = (m * k + k * n) * operand + 2 * m * n
        busy_s = np.maximum(
            2 * m * n * k / (0.7 * rate), moved / (0.8 * device.memory_bandwidth_bytes_per_s)
        )
        sizes = (columns[size].tolist() for size in ("gemm_dtype", *"mnk", "latency"))
        for dtype, *mnk, measured_ms, s in zip(*sizes, (5e-6 + busy_s).tolist(), strict=True):
            label = f"{name} {dtype} {'x'.join(map(str, mnk))}"
            yield Row(label, 1e3 * s, measured_ms, "ms", held_out=True)
