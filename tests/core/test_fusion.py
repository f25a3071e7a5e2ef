"""Fused kernels: known answers by hand for modules on the meta device."""

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from fxpart import DeviceSpec, LatencyModel, Link, evaluate, make_problem, uniform_topology
from fxpart.capture.api import capture_graph
from fxpart.core.fusion import blocks_of, fused, kernel_count
from fxpart.core.graph import OpGraph
from fxpart.core.partitions import partition_by_device

_BYTES = 8 * 16 * 4
"""Bytes of a tensor in these tests."""


class _Block(nn.Module):
    """A product, a chain with a reduction, and a product."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 16, bias=False)
        self.second = nn.Linear(16, 16, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        result = functional.gelu(self.first(x)) * 2 + x
        return self.second(result - result.mean(-1, keepdim=True))  # type: ignore[no-any-return]


class _ReadBetween(nn.Module):
    """A product reads the result of a pointwise operator before the next one does."""

    def __init__(self) -> None:
        super().__init__()
        self.product = nn.Linear(16, 16, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        result = x.sin()
        return self.product(result), result + 1


class _Windows(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return functional.max_pool2d(x.sin()[None], 2).cos()


class _Cache(nn.Module):
    """Two new rows, each written to a free row of its cache."""

    def forward(self, row: Tensor, position: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        keys.index_copy_(0, position, row * 2)
        values.index_copy_(0, position, row.sin())
        return keys @ values.T


class _KeptSum(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        total = x + y
        return total, functional.rms_norm(total, (16,))


class _InPlace(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (x + y).relu_() @ x.T


class _InPlaceInside(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (x + y).relu_() * 2


class _IntoInput(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x.add_(y).relu_() @ y.T


def _graph(module: nn.Module, *args: Tensor) -> OpGraph:
    return capture_graph(module.to("meta"), args or (torch.empty(8, 16, device="meta"),))


def _kernels(graph: OpGraph) -> list[tuple[set[str], int]]:
    """Return the working operators of each kernel, and the bytes that it moves."""
    kernels = fused(graph)
    works = (graph.flops > 0) | (graph.moved_bytes > 0)
    return [
        (
            {graph.names[op] for op in np.flatnonzero((kernels.group == first) & works).tolist()},
            int(kernels.moved_bytes[kernels.group == first].sum()),
        )
        for first in np.unique(kernels.group).tolist()
        if works[kernels.group == first].any()
    ]


def test_a_chain_with_a_reduction_is_one_kernel() -> None:
    graph = _graph(_Block())
    weight = 16 * 16 * 4
    assert _kernels(graph) == [
        ({"linear"}, 2 * _BYTES + weight),
        # It reads the product and x, and writes the value read by the second product.
        ({"gelu", "mul", "add", "mean", "sub"}, 3 * _BYTES),
        ({"linear_1"}, 2 * _BYTES + weight),
    ]
    kernels = fused(graph)
    assert kernel_count(kernels) == 3
    stored = {graph.value_names[v] for v in np.flatnonzero(kernels.value_alloc_bytes).tolist()}
    assert stored == {"x", "linear", "sub", "linear_1"}


def test_values_inside_a_kernel_are_not_in_the_peak() -> None:
    graph = _graph(_Block())
    device = DeviceSpec(
        "one", memory_bytes=10**6, flops_per_s={"float32": 1e12}, memory_bandwidth_bytes_per_s=1e9
    )
    latency = LatencyModel(op_overhead_s=1e-3)
    problem = make_problem(fused(graph), uniform_topology((device,), Link(1e9, 0.0)), latency)
    evaluation = evaluate(
        problem, partition_by_device(graph, np.zeros(graph.n_ops, dtype=np.int64))
    )
    # Two weights and x; the product and the result of the kernel, or that and the other product.
    assert evaluation.peak_bytes == 2 * 16 * 16 * 4 + 3 * _BYTES
    assert 3e-3 < evaluation.latency_s < 3.01e-3


def test_a_value_read_earlier_by_another_operator_gets_its_own_kernel() -> None:
    kernels = _kernels(_graph(_ReadBetween()))
    assert [names for names, _ in kernels] == [{"sin"}, {"linear"}, {"add"}]


def test_inputs_of_windows_are_stored_and_their_results_are_fused() -> None:
    kernels = _kernels(_graph(_Windows()))
    assert [names for names, _ in kernels] == [{"sin"}, {"max_pool2d", "cos"}]


def test_readers_of_one_tensor_are_fused_and_move_only_rows_of_a_cache() -> None:
    row, position = (
        torch.empty(1, 16, device="meta"),
        torch.empty(1, dtype=torch.int64, device="meta"),
    )
    keys, values = torch.empty(8, 16, device="meta"), torch.empty(8, 16, device="meta")
    kernel, _ = _kernels(_graph(_Cache(), row, position, keys, values))
    names, moved = kernel
    assert names == {"mul", "sin", "index_copy_", "index_copy__1"}
    assert moved == 3 * 16 * 4 + 8  # the row, the row of each cache, and the positions


@pytest.mark.parametrize(
    ("module", "names", "tensors"),
    [
        # It reads two; the kept sum is written and not read back.
        (_KeptSum(), {"add", "rms_norm"}, 4),
        # It reads two and writes one, in place or not.
        (_InPlace(), {"add", "relu_"}, 3),
        (_InPlaceInside(), {"add", "relu_", "mul"}, 3),
        (_IntoInput(), {"add_", "relu_"}, 3),
    ],
)
def test_a_kernel_writes_once_and_reads_nothing_back(
    module: nn.Module, names: set[str], tensors: int
) -> None:
    x, y = torch.empty(8, 16, device="meta"), torch.empty(8, 16, device="meta")
    assert (names, tensors * _BYTES) in _kernels(_graph(module, x, y))


def test_an_activation_in_place_after_a_norm_reads_and_writes_one_tensor() -> None:
    layers = (nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), nn.ReLU(inplace=True), nn.Conv2d(3, 3, 1))
    image = torch.empty(1, 3, 8, 8, device="meta")
    kernels = _kernels(_graph(nn.Sequential(*layers).eval(), image))
    weights = 4 * 3 * 4  # scales, shifts, means and variances
    assert ({"batch_norm", "relu_"}, 2 * 3 * 8 * 8 * 4 + weights) in kernels


@pytest.mark.parametrize(("inside", "count"), [(False, 2), (True, 3)])
def test_kernels_do_not_cross_blocks(*, inside: bool, count: int) -> None:
    graph = _graph(nn.Sequential(nn.Linear(16, 16, bias=False), nn.GELU(), nn.SiLU()))
    assert set(blocks_of(graph)) == {"0", "1", "2"}
    kernels = fused(graph, blocks_of(graph) if inside else ())
    assert kernel_count(kernels) == count
    assert len(np.unique(kernels.group)) == count
