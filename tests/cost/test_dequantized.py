"""Products with a dequantized copy of their weights, computed by hand."""

import pytest
import torch
from torch import nn

from fxpart.capture.api import capture_graph
from fxpart.core.few_bits import WeightFormat, dequantized_bytes, with_few_bits
from fxpart.core.graph import OpGraph
from fxpart.core.topology import DeviceSpec, Link, uniform_topology
from fxpart.cost.dequantized import TimesDequantized
from fxpart.cost.roofline import LatencyModel

_ROWS, _COLUMNS, _INPUTS = 384, 256, 3
_COPY_BYTES = _ROWS * _COLUMNS * 2
_DEQUANTIZED_BYTES = _COPY_BYTES + _ROWS * _COLUMNS // 2 + _ROWS * _COLUMNS // 64 * 4
_PRODUCT_BYTES = _COPY_BYTES + _INPUTS * (_ROWS + _COLUMNS) * 2
_FLOPS = 2 * _INPUTS * _ROWS * _COLUMNS


def _layout(fused_rows: int | None) -> WeightFormat:
    return WeightFormat("nf4", 4, group_size=64, group_bytes=4.0, fused_rows=fused_rows)


def _converted(fused_rows: int | None) -> OpGraph:
    with torch.device("meta"):
        module = nn.Linear(_COLUMNS, _ROWS, bias=False, dtype=torch.bfloat16)
        graph = capture_graph(module, (torch.empty(_INPUTS, _COLUMNS, dtype=torch.bfloat16),))
    return with_few_bits(graph, _layout(fused_rows))


def _seconds(graph: OpGraph, fused_rows: int | None, flops_per_s: float) -> float:
    device = DeviceSpec("d", 10**9, {"bfloat16": flops_per_s}, 1e9)
    times = TimesDequantized(LatencyModel(), _layout(fused_rows))
    topology = uniform_topology((device,), Link(1e9, 0.0))
    return float(times.op_time_s(graph, topology).sum())


def test_the_copy_takes_time_beside_a_product_bound_by_arithmetic() -> None:
    graph = _converted(1)
    assert list(dequantized_bytes(graph, _layout(1)).values()) == [_DEQUANTIZED_BYTES]
    slow = _seconds(graph, 1, 1e6)
    assert slow == pytest.approx(_FLOPS / 1e6 + _DEQUANTIZED_BYTES / 1e9, rel=1e-12)
    fast = _seconds(graph, 1, 1e15)
    assert fast == pytest.approx((_PRODUCT_BYTES + _DEQUANTIZED_BYTES) / 1e9, rel=1e-12)


def test_a_kernel_that_reads_quantized_weights_writes_no_copy() -> None:
    graph = _converted(_INPUTS)
    assert dequantized_bytes(graph, _layout(_INPUTS)) == {}
    assert _seconds(graph, _INPUTS, 1e6) == pytest.approx(_FLOPS / 1e6, rel=1e-12)
