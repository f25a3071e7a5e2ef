"""Floating-point operations of calls that torch's own counter counts as zero, or wrongly."""

import pytest
import torch
from torch import Tensor, nn

from fxpart.capture.api import capture_graph
from fxpart.capture.live_bytes import LiveBytes, storage_sizes
from fxpart.capture.models.build import build_model
from fxpart.capture.training.joint import joint_graph
from fxpart.core.graph import OpGraph
from fxpart.core.temporaries import TEMPORARY
from tests.execution.small_presets import SMALL_PRESETS


def _flops(graph: OpGraph, called: str) -> int:
    """Return the FLOPs of all operators whose target contains `called`."""
    return sum(int(f) for t, f in zip(graph.targets, graph.flops, strict=True) if called in t)


def test_a_mixture_of_experts_costs_twice_its_forward_backward() -> None:
    spec = SMALL_PRESETS["mixtral_8x7b"]
    built = build_model(spec)
    graph = joint_graph(built.module, built.args, built.kwargs)
    assert spec.seq_len is not None
    # Each token goes to 2 experts: 32 wide in, 2 x 72 inside, 32 out; 2 layers.
    rows = 2 * spec.batch_size * spec.seq_len
    forward = 2 * 2 * rows * (32 * 2 * 72 + 72 * 32)
    assert _flops(graph, "grouped_mm_fallback.default") == forward
    assert _flops(graph, "grouped_mm_fallback_backward.default") == 2 * forward


class _Attention(nn.Module):
    def __init__(self, *, is_causal: bool, enable_gqa: bool) -> None:
        super().__init__()
        self.is_causal, self.enable_gqa = is_causal, enable_gqa

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=self.is_causal, enable_gqa=self.enable_gqa
        )


@pytest.mark.parametrize(
    ("is_causal", "key_heads"), [(False, 8), (True, 8), (True, 2)], ids=["full", "causal", "shared"]
)
def test_all_products_of_attention_count(is_causal: bool, key_heads: int) -> None:
    module = _Attention(is_causal=is_causal, enable_gqa=key_heads < 8)
    query, key, value = (
        torch.zeros(2, heads, 6, 4, device="meta", requires_grad=True)
        for heads in (8, key_heads, key_heads)
    )
    products = 4 * 2 * 8 * 6 * 6 * 4
    assert int(capture_graph(module, (query, key, value)).flops.sum()) == products
    # In the backward, the scores are recomputed, and each product has gradients of both factors.
    assert int(joint_graph(module, (query, key, value)).flops.sum()) == products * 7 // 2


@pytest.mark.parametrize("layout", ["rows", "columns", "no heads", "one key head"])
def test_attention_that_no_fused_kernel_takes_holds_its_scores(layout: str) -> None:
    """As torch itself runs it on the CPU, whose kernels refuse the same layouts as CUDA's."""

    class _Attend(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            heads = x.reshape(2, 4, 256, 16)
            if layout == "columns":
                heads = x.reshape(2, 4, 16, 256).transpose(-1, -2)
            elif layout == "no heads":
                heads = x.reshape(8, 256, 16)
            keys = heads[:, :1] if layout == "one key head" else heads
            return nn.functional.scaled_dot_product_attention(heads, keys, keys)

    graph = capture_graph(_Attend(), (torch.zeros(2, 4, 256, 16, device="meta"),))
    (op,) = (i for i, target in enumerate(graph.targets) if "attention" in target)
    temporary = [name.endswith(TEMPORARY) for name in graph.value_names]
    temporary_bytes = int(graph.value_bytes[temporary].sum())
    x, scores_bytes = torch.zeros(2, 4, 256, 16), 2 * 4 * 256 * 256 * 4
    with torch.no_grad(), LiveBytes([storage_sizes([x])]) as live:
        result = _Attend()(x)
    beside = live.peak_bytes[0] - 2 * x.numel() * 4
    assert result.shape[-1] == 16
    if layout == "rows":
        assert temporary_bytes == 2 * 4 * 256 * 4  # the logarithm of a sum for each row
        assert graph.moved_bytes[op] == 2 * x.numel() * 4
        assert graph.attention.tolist() == [[op, 16, 0]]
    else:
        assert temporary_bytes == beside >= 2 * scores_bytes
        # Both products and the softmax write or read all scores.
        assert graph.moved_bytes[op] > 4 * scores_bytes
        assert not len(graph.attention)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("groups", [1, 4, 16])
def test_gradients_of_grouped_convolutions_take_the_flops_of_their_forward(
    groups: int, *, transposed: bool
) -> None:
    kind = nn.ConvTranspose2d if transposed else nn.Conv2d
    module = nn.Sequential(kind(16, 32, 3, groups=groups), kind(32, 16, 3, groups=groups))
    graph = joint_graph(module, (torch.zeros(2, 16, 12, 12),))
    forward = [
        int(f)
        for t, f in zip(graph.targets, graph.flops, strict=True)
        if t == "aten.convolution.default"
    ]
    if not transposed:
        assert forward[0] == 2 * (9 * 16 // groups) * (2 * 32 * 10 * 10)
    # The input of the first needs no gradient.
    assert _flops(graph, "convolution_backward") == forward[0] + 2 * forward[1]
