"""Shapes of products and attentions from bytes and FLOPs, against those that eager mode sees."""

from collections import Counter
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode

from fxpart.capture import capture
from fxpart.cost.curves.shapes import shapes_of

Shape = tuple[int, ...]


class _Seen(TorchDispatchMode):  # type: ignore[no-untyped-call]
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


def test_products_are_those_that_run() -> None:
    inputs = (torch.zeros(3, 5, 24), torch.zeros(2, 4, 17, 17))
    model = _Products()
    with _Seen() as seen, torch.no_grad():
        model(*inputs)
    shapes = shapes_of(capture(model, inputs).graph)
    rows = zip(*(column.tolist() for column in shapes.products[:4]), strict=True)
    # Which of the two operands is the left one, bytes do not say; time hardly depends on it.
    captured = Counter((b, *sorted((m, n)), k) for b, m, n, k in rows)
    expected: Counter[Any] = Counter()
    for (b, m, n, k), count in seen.shapes.items():
        expected[b, *sorted((m, n)), k] += count
    assert captured == expected
    assert len(captured) == 6


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
