"""What limits an operator: classes of operators that one rate holds for."""

import numpy as np
import numpy.typing as npt

from fxpart.graph import IntArray, OpGraph

__all__ = ["FRESH_BYTES", "compute_keys", "fresh_bytes", "is_free", "is_view"]

FRESH_BYTES = 2**25


def compute_keys(graph: OpGraph) -> list[str]:
    """Return for each operator its class and dtype, such as ``gemm float32``. Length n.

    ``""`` for one that computes nothing (no matrix product, convolution or attention).
    """
    return [
        f"{_compute_class(target)} {dtype}" if flops > 0 else ""
        for target, dtype, flops in zip(graph.targets, graph.dtypes, graph.flops, strict=True)
    ]


def _compute_class(target: str) -> str:
    if "conv" in target:
        return "convolution"
    return "attention" if "attention" in target else "gemm"


def fresh_bytes(graph: OpGraph) -> IntArray:
    """Return the bytes of each operator's results too large to be kept for reuse. Length n.

    The C library of a CPU asks the system for such memory anew each time (from 32 MiB on, in
    glibc), and the system hands it over page by page as it is first written.
    """
    large = (graph.value_alloc_bytes >= FRESH_BYTES) & (graph.value_producer >= 0)
    found = np.zeros(graph.n_ops, dtype=np.int64)
    np.add.at(found, graph.value_producer[large], graph.value_alloc_bytes[large])
    return found


def is_view(graph: OpGraph) -> npt.NDArray[np.bool_]:
    """Return which operators neither compute nor move bytes. Length n."""
    found: npt.NDArray[np.bool_] = (graph.flops == 0) & (graph.moved_bytes == 0)
    return found


def is_free(graph: OpGraph) -> npt.NDArray[np.bool_]:
    """Return which operators call nothing on the device: they only take an item. Length n."""
    return np.array([target == "getitem" for target in graph.targets], dtype=np.bool_)
