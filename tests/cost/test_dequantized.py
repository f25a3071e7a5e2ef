"""Products with a dequantized copy of their weights, or with cast inputs, computed by hand."""

import pytest
import torch
from torch import nn

from fxpart.capture.api import capture_graph
from fxpart.core.few_bits import WeightFormat, dequantized_bytes, with_few_bits
from fxpart.core.graph import OpGraph
from fxpart.core.topology import DeviceSpec, Link, uniform_topology
from fxpart.cost.dequantized import TimesDequantized, TimesWithCastInputs
from fxpart.cost.roofline import LatencyModel
from fxpart.errors import SpecError

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


_FP8 = WeightFormat("fp8", 8, row_bytes=4.0, activations="fp8")


class _TwoOfOneInput(nn.Module):
    """Two layers that read the same tensor, as those of keys and values do."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(_COLUMNS, _ROWS, bias=False, dtype=torch.bfloat16)
        self.second = nn.Linear(_COLUMNS, _ROWS, bias=False, dtype=torch.bfloat16)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.first(x), self.second(x)


def _cast_seconds(rates: dict[str, float], *, fuses_casts: bool) -> float:
    with torch.device("meta"):
        inputs = torch.empty(_INPUTS, _COLUMNS, dtype=torch.bfloat16)
        graph = with_few_bits(capture_graph(_TwoOfOneInput(), (inputs,)), _FP8)
    topology = uniform_topology((DeviceSpec("d", 10**9, rates, 1e9),), Link(1e9, 0.0))
    times = TimesWithCastInputs(LatencyModel(), _FP8, fuses_casts=fuses_casts)
    return float(times.op_time_s(graph, topology).sum())


def test_products_with_cast_inputs_take_the_rate_of_8_bits() -> None:
    slow = {"bfloat16": 1e6, "float8_e4m3fn": 2e6}
    assert _cast_seconds(slow, fuses_casts=True) == pytest.approx(2 * _FLOPS / 2e6, rel=1e-12)
    fast = {"bfloat16": 1e15, "float8_e4m3fn": 2e15}
    weights = _ROWS * _COLUMNS + 4 * _ROWS
    product_bytes = weights + _INPUTS * (_COLUMNS + 2 * _ROWS)
    fused_s = 2 * product_bytes / 1e9
    assert _cast_seconds(fast, fuses_casts=True) == pytest.approx(fused_s, rel=1e-12)
    # One cast of what both read: two bytes of an element are read, and one is written.
    cast_s = 3 * _INPUTS * _COLUMNS / 1e9
    assert _cast_seconds(fast, fuses_casts=False) == pytest.approx(fused_s + cast_s, rel=1e-12)


def test_cast_inputs_need_a_device_and_a_format_of_8_bits() -> None:
    with pytest.raises(SpecError, match=r"d has no rate of float8_e4m3 .*weights.activations"):
        _cast_seconds({"bfloat16": 1e15}, fuses_casts=True)
    with pytest.raises(SpecError, match=r"activations=fp8 does not go with weights=int8"):
        WeightFormat("int8", 8, activations="fp8")
    with pytest.raises(SpecError, match=r"activations=int8 does not go with weights=fp8"):
        WeightFormat("fp8", 8, activations="int8")
