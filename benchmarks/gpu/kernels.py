"""Measure kernels by shape on a GPU: products in float32, convolutions, and pointwise operators.

Times are the device's in microseconds, from one kernel's beginning to the next one's, with cold
weights: calls are queued behind a long product, and each uses another copy of the weight, up to 10
copies or 256 MB. The rows under ``constants`` of what `benchmarks.gpu.measure` writes, with four
digits, are ``benchmarks/gpu/h100_kernels.json``.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

__all__ = ["PARTS"]

_CALLS, _REPEATS = 10, 5
_COPIES_BYTES = 256e6
_LONGEST_S = 20e-3
"""Shapes that take longer are not measured."""
_FLOPS_PER_S = 45e12
"""In float32, for the limit."""
_FEWEST_ROWS_OF_GRADIENTS = 64

_ROWS = (1, 8, 64, 197, 512, 1024, 2048, 4096, 8192, 16384)
_WEIGHTS: tuple[tuple[int, int], ...] = (
    (768, 768),
    (768, 3072),
    (3072, 768),
    (1024, 1024),
    (4096, 1024),
    (1024, 4096),
)
_WEIGHTS += ((1000, 1024), (2304, 768), (4096, 4096), (11008, 4096), (50257, 768), (30522, 1024))
"""(n, k)."""
_BATCHED = (
    *((16, 512, 512, 64), (16, 512, 64, 512), (12, 1024, 1024, 64), (12, 1024, 64, 1024)),
    *((256, 512, 512, 64), (256, 512, 64, 512), (96, 1500, 1500, 64), (128, 197, 197, 64)),
)
"""(batch, m, n, k)."""

_CONVOLUTIONS = (
    # channels, filters, kernel, stride, side of the image
    (3, 64, 7, 2, 224),
    (64, 64, 1, 1, 56),
    (64, 64, 3, 1, 56),
    (64, 256, 1, 1, 56),
    (256, 64, 1, 1, 56),
    (256, 128, 1, 1, 56),
    (128, 128, 3, 2, 56),
    (128, 128, 3, 1, 28),
    (128, 512, 1, 1, 28),
    (512, 128, 1, 1, 28),
    (256, 512, 1, 2, 56),
    (256, 256, 3, 1, 14),
    (256, 1024, 1, 1, 14),
    (1024, 256, 1, 1, 14),
    (512, 512, 3, 1, 7),
    (512, 2048, 1, 1, 7),
    (2048, 512, 1, 1, 7),
    (320, 320, 3, 1, 64),
    (1280, 1280, 3, 1, 16),
    (3, 1024, 16, 16, 224),
)


def _queued_us(calls: Sequence[Callable[[], object]]) -> float:
    """Return the median time of a call on the device, in us, over rounds of all calls."""
    blocker = torch.empty(4096, 4096, device="cuda")
    for call in calls:
        call()
    times = []
    for _ in range(_REPEATS):
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        torch.mm(blocker, blocker)  # 2.5 ms, in which all calls are queued
        first.record()
        for call in calls:
            call()
        last.record()
        torch.cuda.synchronize()
        times.append(float(first.elapsed_time(last)) * 1e3 / len(calls))
    return sorted(times)[len(times) // 2]


def _copies(tensor: Tensor) -> Iterator[Tensor]:
    """Yield `_CALLS` tensors, copies of `tensor` as long as they fit in `_COPIES_BYTES`."""
    count = max(1, min(_CALLS, int(_COPIES_BYTES / tensor.nbytes)))
    copies = [tensor, *(tensor.clone() for _ in range(count - 1))]
    return itertools.islice(itertools.cycle(copies), _CALLS)


def _products(_: int) -> dict[str, Any]:
    """Measure products in float32: kind, batch, m, n, k, time."""
    rows: list[list[Any]] = []
    for m, (n, k) in itertools.product(_ROWS, _WEIGHTS):
        if 2 * m * n * k / _FLOPS_PER_S > _LONGEST_S:
            continue
        x, bias = torch.randn(m, k, device="cuda"), torch.randn(n, device="cuda")
        weight, by_rows = torch.randn(n, k, device="cuda"), torch.randn(k, n, device="cuda")
        linears = [partial(functional.linear, x, w, bias) for w in _copies(weight)]
        products = [partial(torch.mm, x, w) for w in _copies(by_rows)]
        rows.append(["linear", 1, m, n, k, _queued_us(linears)])
        rows.append(["mm", 1, m, n, k, _queued_us(products)])
        if m >= _FEWEST_ROWS_OF_GRADIENTS:
            gradient = torch.randn(m, n, device="cuda")
            of_weight = [partial(torch.mm, gradient.t(), x)] * _CALLS
            rows.append(["weight gradient", 1, n, k, m, _queued_us(of_weight)])
    for batch, m, n, k in _BATCHED:
        left = torch.randn(batch, m, k, device="cuda")
        right = torch.randn(batch, k, n, device="cuda")
        rows.append(["bmm", batch, m, n, k, _queued_us([partial(torch.bmm, left, right)] * _CALLS)])
    return {"rows": rows}


def _convolutions(_: int) -> dict[str, Any]:
    """Measure convolutions.

    Each row has dtype, batch, channels, filters, kernel, stride, side of the image, time of the
    forward, and from batch 8 those of the gradients of the input, of the weight and of both.
    """
    rows: list[list[Any]] = []
    for dtype, batch, shape in itertools.product(
        (torch.float32, torch.bfloat16), (1, 8, 64), _CONVOLUTIONS
    ):
        channels, filters, kernel, stride, side = shape
        x = torch.randn(batch, channels, side, side, device="cuda", dtype=dtype)
        weight = torch.randn(filters, channels, kernel, kernel, device="cuda", dtype=dtype)
        padding = 0 if kernel == stride else kernel // 2
        convolve = partial(functional.conv2d, bias=None, stride=stride, padding=padding)
        with torch.no_grad():
            times = [_queued_us([partial(convolve, x, w) for w in _copies(weight)])]
        if batch > 1:
            x.requires_grad_()
            weight.requires_grad_()
            result = convolve(x, weight)
            times += [_gradient_us(result, leaves) for leaves in ((x,), (weight,), (x, weight))]
        rows.append([_name(dtype), batch, *shape, *times])
    return {"rows": rows}


def _gradient_us(result: Tensor, inputs: Sequence[Tensor]) -> float:
    gradient = torch.randn_like(result)
    backward = partial(torch.autograd.grad, result, inputs, gradient, retain_graph=True)
    return _queued_us([backward] * _CALLS)


def _pointwise(_: int) -> dict[str, Any]:
    """Measure operators limited by bandwidth.

    Each row has operator, dtype, bytes of the operand, time, and time of its backward. That of a
    layer norm is without the gradients of its weights; backwards of operators without kernels of
    their own, such as additions, are of views.
    """
    rows: list[list[Any]] = []
    for dtype, power in itertools.product((torch.float32, torch.bfloat16), range(12, 29, 2)):
        x = torch.randn(2**power // 1024, 1024, device="cuda", dtype=dtype)
        for operator, (call, operand) in _operators(x).items():
            with torch.no_grad():
                forward_us = _queued_us([partial(call, operand)] * _CALLS)
            leaf = operand.clone().requires_grad_()
            backward_us = _gradient_us(call(leaf), (leaf,))
            rows.append([operator, _name(dtype), x.nbytes, forward_us, backward_us])
    return {"rows": rows}


def _operators(x: Tensor) -> dict[str, tuple[Callable[..., Tensor], Tensor]]:
    """Return functions of one operand, with it: `x` of shape (rows, 1024), or `x` as images."""
    y, row = torch.randn_like(x), torch.ones(1024, device="cuda", dtype=x.dtype)
    image = x.view(-1, min(64, len(x)), 16, 64)
    channel = torch.ones(image.shape[1], device="cuda")
    other_dtype = torch.bfloat16 if x.dtype == torch.float32 else torch.float32
    normalize = partial(functional.layer_norm, normalized_shape=(1024,), weight=row, bias=row)
    pool = partial(functional.max_pool2d, kernel_size=3, stride=2, padding=1)
    return {
        "add": (y.add, x),
        "add_row": (row.add, x),
        "relu": (functional.relu, x),
        "gelu": (functional.gelu, x),
        "copy": (torch.clone, x),
        "transpose": (lambda tensor: tensor.t().contiguous(), x),
        "cast": (partial(torch.Tensor.to, dtype=other_dtype), x),
        "softmax": (partial(torch.softmax, dim=-1), x),
        "layer_norm": (normalize, x),
        "dropout": (functional.dropout, x),
        "sum": (torch.sum, x),
        "sum_rows": (partial(torch.sum, dim=0), x),
        "batch_norm": (_batch_norm(channel, training=False), image),
        "batch_norm_training": (_batch_norm(channel, training=True), image),
        "max_pool": (pool, image),
    }


def _batch_norm(channel: Tensor, *, training: bool) -> Callable[..., Tensor]:
    mean, deviation = channel.clone(), channel.clone()
    return partial(
        functional.batch_norm,
        running_mean=mean,
        running_var=deviation,
        weight=channel,
        bias=channel,
        training=training,
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


PARTS: dict[str, Callable[[int], dict[str, Any]]] = {
    "products": _products,
    "convolutions": _convolutions,
    "pointwise": _pointwise,
}
"""Measurements by name; each receives the bytes in use on the device, which it does not need."""
