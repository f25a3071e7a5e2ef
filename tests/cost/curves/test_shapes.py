"""Shapes of products and attentions derived from bytes and FLOPs, against those of eager mode."""

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.truth.kernel_tables import DEVICES, FAMILIES
from fxpart.capture import capture
from fxpart.capture.training.joint import joint_graph
from fxpart.core.graph import FloatArray, OpGraph
from fxpart.core.reserve import rounded
from fxpart.core.topology import Link, uniform_topology
from fxpart.cost.curves.family import CurveFamily
from fxpart.cost.curves.model import KernelModel
from fxpart.cost.curves.shapes import shapes_of
from fxpart.cost.roofline import LatencyModel

Shape = tuple[int, ...]


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records B, m, n, k of each product that runs."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.shapes: Counter[Shape] = Counter()

    def __torch_dispatch__(
        self,
        func: Any,  # noqa: ANN401 - as torch hands them over
        types: Any,  # noqa: ANN401
        args: Any = (),  # noqa: ANN401
        kwargs: Any = None,  # noqa: ANN401
    ) -> Any:  # noqa: ANN401
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name in ("mm", "bmm"):
            a, b = args[:2]
            self._add(a.shape[0] if a.dim() == 3 else 1, a.shape[-2], b.shape[-1], a.shape[-1])
        elif name in ("addmm", "baddbmm"):
            a, b = args[1:3]
            self._add(a.shape[0] if a.dim() == 3 else 1, a.shape[-2], b.shape[-1], a.shape[-1])
        elif name == "convolution":
            channels, *rest = args[1].shape
            self._add(1, result.numel() // channels, channels, int(np.prod(rest)))
        return result

    def _add(self, batch: int, *mnk: int) -> None:
        self.shapes[(batch, *mnk)] += 1


class _Products(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.biased = nn.Linear(24, 40)
        self.plain = nn.Linear(40, 7, bias=False)
        self.convolution = nn.Conv2d(4, 12, 3, stride=2)
        self.by_group = nn.Conv2d(12, 12, 3, groups=12)

    def forward(self, x: Tensor, image: Tensor) -> tuple[Tensor, ...]:
        y = self.plain(self.biased(x))
        pairs = torch.bmm(x, x.transpose(1, 2))
        added = torch.baddbmm(pairs, x, x.transpose(1, 2) * 2)
        return y, added, self.by_group(self.convolution(image)), torch.mm(x[0], x[0].t())


def test_products_equal_those_that_run() -> None:
    inputs = (torch.zeros(3, 5, 24), torch.zeros(2, 4, 17, 17))
    model = _Products()
    with _Recorder() as recorded, torch.no_grad():
        model(*inputs)
    shapes = shapes_of(capture(model, inputs).graph)
    rows = zip(*(column.tolist() for column in shapes.products[:4]), strict=True)
    # Bytes do not determine which operand is the left one; time hardly depends on it.
    captured = Counter((b, *sorted((m, n)), k) for b, m, n, k in rows)
    expected: Counter[Any] = Counter()
    for (b, m, n, k), count in recorded.shapes.items():
        expected[b, *sorted((m, n)), k] += count
    assert captured == expected
    assert len(captured) == 6


def test_a_bias_is_not_an_operand() -> None:
    # The bias and the weight have as many elements as two products of (1, 1024) with (1024, 1024).
    shapes = shapes_of(capture(nn.Linear(1024, 2048), (torch.zeros(1, 1024),)).graph)
    assert [column.tolist() for column in shapes.products[:1]] == [[1]]
    assert sorted(float(column[0]) for column in shapes.products[1:3]) == [1, 2048]
    assert shapes.products.k.tolist() == [1024]


class _Step(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(8, 16, 3), nn.Conv2d(16, 4, 3)
        self.line = nn.Linear(24, 40)

    def forward(self, image: Tensor, x: Tensor, q: Tensor) -> Tensor:
        y = self.second(self.first(image))
        keys = q * self.line.bias[:16]
        attended = scaled_dot_product_attention(keys, keys, keys, is_causal=True)
        loss: Tensor = y.mean() + self.line(x).mean() + attended.mean()
        return loss


def test_a_backward_has_the_shapes_of_its_gradients() -> None:
    inputs = (torch.zeros(2, 8, 34, 34), torch.zeros(3, 5, 24), torch.zeros(2, 4, 6, 16))
    graph = joint_graph(_Step(), inputs)
    shapes = shapes_of(graph)
    rows = zip(*(column.tolist() for column in shapes.products[:4]), strict=True)
    backward = {
        (graph.targets[op].split(".")[1], count, b, m, n, k)
        for op, count, (b, m, n, k) in zip(
            shapes.product_ops.tolist(), shapes.product_calls.tolist(), rows, strict=True
        )
        if graph.is_backward[op]
    }
    # The image needs no gradient: the backward of the first convolution is one product.
    assert ("convolution_backward", 1, 1, 2 * 32 * 32, 16, 8 * 9) in backward
    assert ("convolution_backward", 2, 1, 2 * 30 * 30, 4, 16 * 9) in backward
    # Only of the weight: (40, 15) with (15, 24).
    assert [sorted(row[3:5]) for row in backward if row[0] == "mm"] == [[24, 40]]
    assert [row[5] for row in backward if row[0] == "mm"] == [15]
    assert shapes.is_backward.tolist() == [0, 1]
    calls = shapes.attentions
    assert calls.keys.tolist() == calls.queries.tolist() == [6, 6]
    assert (
        (calls.batch * calls.heads).tolist() == (calls.batch * calls.key_heads).tolist() == [8, 8]
    )


class _Convolutions(nn.Module):
    """Patches, a norm, kernels of nine pixels and of one, pooling, and layers."""

    def __init__(self, side: int = 40) -> None:
        super().__init__()
        self.patches, self.norm = nn.Conv2d(3, 8, 4, stride=4, bias=False), nn.BatchNorm2d(8)
        self.wide, self.point = nn.Conv2d(8, 16, 3, padding=1), nn.Conv2d(16, 4, 1)
        self.line, self.plain = nn.Linear(side // 8, 6), nn.Linear(6, 6, bias=False)

    def forward(self, image: Tensor) -> Tensor:
        y = self.point(self.wide(self.norm(self.patches(image))))
        y = self.plain(self.line(nn.functional.max_pool2d(y, 2)))
        loss: Tensor = y.mean()
        return loss


IMAGE = (2, 3, 40, 40)


def test_kernels_of_more_than_one_pixel_change_the_layout_of_input_and_result() -> None:
    shapes = shapes_of(capture(_Convolutions(), (torch.zeros(IMAGE),)).graph)
    assert shapes.is_convolution.tolist() == [True] * 3 + [False] * 2
    assert shapes.has_bias.tolist() == [False, False, False, True, False]
    patches, wide, point = shapes.convolutions.layout_bytes.tolist()
    assert patches == 2 * 4 * (2 * 3 * 1600 + 2 * 8 * 100)
    assert wide == 2 * 4 * (2 * 8 * 100 + 2 * 16 * 100)
    assert point == 0
    assert shapes.convolutions.reads_input.tolist() == [True, False, False]
    assert not shapes.channels_last().convolutions.layout_bytes.any()


def test_layouts_of_gradients_are_those_of_forwards_in_any_dtype() -> None:
    forward = shapes_of(capture(_Convolutions(), (torch.zeros(IMAGE),)).graph)
    for dtype, element in ((torch.float32, 4), (torch.bfloat16, 2)):
        module, image = _Convolutions().to(dtype), torch.zeros(IMAGE, dtype=dtype)
        step = shapes_of(joint_graph(module, (image,)))
        layouts = step.convolutions.layout_bytes[step.is_gradient[step.is_convolution]]
        expected = forward.convolutions.layout_bytes / 4 * element
        assert sorted(layouts.tolist()) == sorted(expected.tolist())
        # The image needs no gradient.
        assert sorted(step.product_calls[step.is_gradient].tolist()) == [1, 2, 2]


def test_a_computed_kernel_is_not_taken_for_its_bias() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.gain = (
                nn.Parameter(torch.zeros(32, 4, 3, 3)),
                nn.Parameter(torch.zeros(1)),
            )
            self.bias = nn.Parameter(torch.zeros(32))

        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.conv2d(x, self.weight * self.gain, self.bias)

    products = shapes_of(capture(Scaled(), (torch.zeros(2, 4, 12, 12),)).graph).products
    assert [column.tolist() for column in products[1:4]] == [[200], [32], [36]]


def test_norms_of_few_channels_and_gradients_of_convolutions_are_slow() -> None:
    """Channels come from the bytes that are moved, since those of weights are rounded."""
    family = replace(FAMILIES["h100"], op_overhead_s=0.0)
    topology = uniform_topology((DEVICES["h100_sxm"],), Link(1e9))

    def times(curves: CurveFamily, graph: OpGraph) -> FloatArray:
        model = KernelModel({"h100": curves}, LatencyModel())
        seconds: FloatArray = model.op_time_s(graph, topology)[:, 0]
        return seconds

    graph = joint_graph(_Convolutions(256), (torch.zeros(64, 3, 256, 256),))
    plain = times(family, graph)
    moves = graph.flops == 0
    assert (times(family, rounded(graph, 512))[moves] == plain[moves]).all()
    assert family.bandwidth_shares is not None
    for target, kind in (
        ("aten.native_batch_norm.default", "batch_norm_training"),
        ("aten.native_batch_norm_backward.default", "batch_norm_backward"),
    ):
        op = graph.targets.index(target)
        share = family.bandwidth_shares[kind][0] * 8 / 132  # channels on multiprocessors
        assert plain[op] == pytest.approx(graph.moved_bytes[op] / (3.35e12 * share), rel=0.02)
    assert family.convolution is not None
    slow = replace(family.convolution, gradient_work=10 * family.convolution.gradient_work)
    slower = times(replace(family, convolution=slow), graph)
    backward = [op for op, t in enumerate(graph.targets) if "convolution_backward" in t]
    assert len(backward) == 3
    assert slower[backward] == pytest.approx(10 * plain[backward])
    others = np.setdiff1d(np.arange(graph.n_ops), backward)
    assert (slower[others] == plain[others]).all()


class _Attention(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        causal = scaled_dot_product_attention(q, q, q, is_causal=True)
        return causal, scaled_dot_product_attention(q, k, v, enable_gqa=True)


def test_attentions_have_their_heads_and_lengths() -> None:
    q, k = torch.zeros(2, 8, 6, 16), torch.zeros(2, 4, 10, 16)
    shapes = shapes_of(capture(_Attention(), (q, k, k)).graph)
    calls = shapes.attentions
    assert calls.head_size.tolist() == [16, 16]
    assert calls.causal.tolist() == [1, 0]
    assert calls.keys.tolist() == [6, 10]
    assert (calls.batch * calls.heads * calls.queries).tolist() == [2 * 8 * 6] * 2
    assert calls.queries[0] == 6
    assert (calls.batch * calls.key_heads).tolist() == [16, 8]
    assert not len(shapes.product_ops)


class _Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(16, 32, 64, dtype=torch.bfloat16))

    def forward(self, rows: Tensor, ends: Tensor) -> Tensor:
        return torch._grouped_mm(rows, self.weight, offs=ends)


@pytest.mark.parametrize(
    ("rows", "read", "rows_each"), [(4, 4, 1), (12, 12, 1), (16, 16, 1), (64, 16, 4)]
)
def test_experts_that_no_row_chooses_are_not_read(rows: int, read: int, rows_each: int) -> None:
    inputs = (torch.zeros(rows, 32, dtype=torch.bfloat16), torch.zeros(16, dtype=torch.int32))
    products = shapes_of(capture(_Experts(), inputs).graph).products
    assert products.batch.tolist() == [read]
    assert (products.m.tolist(), products.n.tolist(), products.k.tolist()) == (
        [rows_each],
        [64],
        [32],
    )


def test_a_token_has_shared_key_heads_however_they_are_packed() -> None:
    k = torch.zeros(2, 4, 200, 16)
    for q in (torch.zeros(2, 32, 1, 16), torch.zeros(2, 4, 8, 16)):
        calls = shapes_of(capture(_Attention(), (q, k, k)).graph).attentions
        assert calls.queries[1] == 1
        assert (calls.batch * calls.heads)[1] == 64
        assert (calls.batch * calls.key_heads)[1] == 8
    calls = shapes_of(capture(_Attention(), (torch.zeros(2, 4, 100, 16), k, k)).graph).attentions
    assert calls.queries[1] == 100  # a piece of a prompt
