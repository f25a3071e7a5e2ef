"""Casts of autocast: the lists of torch's header, `torch.autocast` on the CPU, and real steps."""

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fxpart.capture.live_bytes import LiveBytes, storage_sizes
from fxpart.capture.models import autocast as lists
from fxpart.capture.models.autocast import autocast, regions_of_cuda, with_own_regions
from fxpart.capture.training.joint import joint_capture
from fxpart.cost.evaluate import peak_bytes
from fxpart.cost.tables import memory_tables

F = nn.functional
_INSIDE_OTHERS = re.compile("_?upsample|_thnn_fused|_scaled_dot_product_flash")
"""Operators called by `interpolate`, cells and attention."""


@pytest.mark.parametrize(
    ("macro", "names"),
    [
        ("LOWER_PRECISION_FP", lists.IN_16_BITS),
        ("FP32", lists.IN_FLOAT32),
        ("FP32_SET_OPT_DTYPE", lists.SUMMED_IN_FLOAT32),
        ("PROMOTE", lists.IN_THE_WIDEST),
    ],
)
def test_the_lists_equal_those_of_torch(macro: str, names: frozenset[str]) -> None:
    header = (Path(torch.__file__).parent / "include/ATen/autocast_mode.h").read_text()
    _, _, rest = header.partition(f"#define AT_FORALL_{macro}(_)")
    entries = rest.partition("\n\n")[0]
    listed = set(re.findall(r"_\((\w+)", entries))
    assert len(listed) >= 8
    assert not {name for name in listed - names if not _INSIDE_OTHERS.match(name)}


def _call(function: Callable[..., Tensor]) -> nn.Module:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.rand(4, 4))

        def forward(self, x: Tensor) -> Tensor:
            return function(x, self.weight)

    return Model()


SHORT, LONG = torch.bfloat16, torch.float32


@pytest.mark.parametrize("given", [SHORT, LONG])
@pytest.mark.parametrize(
    "function",
    [
        F.linear,
        torch.matmul,
        lambda x, w: x @ w,
        lambda x, w: torch.einsum("ij,jk->ik", x, w),
        lambda x, w: torch.addmm(w[0], x, w),
        lambda x, w: F.conv1d(x[..., None], w[..., None]),
        lambda x, w: F.scaled_dot_product_attention(x[None], w[None], w[None]),
        lambda x, w: F.mse_loss(F.linear(x, w), x),
        lambda x, w: F.gelu(F.linear(x, w)) + x,
        lambda x, w: torch.cat([F.linear(x, w), w]),
    ],
)
def test_casts_equal_those_of_the_cpu_where_the_lists_agree(
    function: Callable[..., Tensor], given: torch.dtype
) -> None:
    model, x = _call(function), torch.rand(2, 4).to(given)
    with torch.autocast("cpu", SHORT):
        expected = model(x)
    autocast(model, SHORT)
    result = model(x)
    assert result.dtype == expected.dtype
    torch.testing.assert_close(result, expected)


@pytest.mark.parametrize(
    ("function", "dtype"),
    [
        (lambda x: F.softmax(x, dim=-1), LONG),
        (lambda x: x.softmax(-1, torch.float64), torch.float64),
        (lambda x: F.layer_norm(x, (4,)), LONG),
        (lambda x: x**2, LONG),
        (lambda x: 1 / x, LONG),
        (lambda x: x.sum(), LONG),
        (lambda x: F.cross_entropy(x, torch.zeros(2, dtype=torch.int64)), LONG),
        (lambda x: torch.dot(x[0], x[1].float()), LONG),
        (lambda x: torch.dot(x[0], x[1]), SHORT),
        (lambda x: F.gelu(x) * 2, SHORT),
        (lambda x: x.double() @ x.double().T, torch.float64),
    ],
)
def test_functions_listed_only_for_cuda(
    function: Callable[[Tensor], Tensor], dtype: torch.dtype
) -> None:
    model = _call(lambda x, _: function(x))
    autocast(model, SHORT)
    assert model(torch.rand(2, 4).to(SHORT)).dtype == dtype


def _step() -> tuple[nn.Module, Tensor]:
    """Return a model that uses one weight twice, with functions in both lists."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.outer = nn.Linear(32, 64), nn.Linear(64, 32)

        def forward(self, x: Tensor) -> Tensor:
            hidden = torch.relu(self.inner(x))
            again = torch.relu(self.inner(self.outer(hidden)))
            return F.mse_loss(self.outer(again), x)

    torch.manual_seed(0)
    return Model(), torch.rand(16, 32)


def _live(model: nn.Module, x: Tensor) -> tuple[int, int]:
    """Return the bytes that are live after a forward, and at the peak of the step."""
    with LiveBytes([storage_sizes([*model.parameters(), x])]) as counter:
        loss = model(x)
        saved = counter.live_bytes[0]
        loss.backward()
    model.zero_grad()
    return saved, counter.peak_bytes[0]


def _predicted(model: nn.Module, x: Tensor) -> tuple[int, list[str]]:
    """Return the peak of the captured step, and the casts of its forward."""
    graph = joint_capture(model, (x,)).graph
    casts = [name for name in graph.names[: graph.first_backward] if "_to_copy" in name]
    devices = np.zeros(graph.n_ops, dtype=np.int64)
    return int(peak_bytes(memory_tables(graph), devices, 1)[0]), casts


def _under(forward: Callable[..., Tensor], device: str) -> Callable[[Tensor], Tensor]:
    """Return a forward in a region of its own that contains a product in a disabled region."""

    def with_regions(x: Tensor) -> Tensor:
        with torch.autocast(device, SHORT):
            with torch.autocast(device, enabled=False):
                assert (x[:1] @ x[:1].T).dtype == LONG
            return forward(x)

    return with_regions


def test_regions_of_a_forward_cast_as_on_the_cpu() -> None:
    model, x = _step()
    forward = model.forward
    model.forward = _under(forward, "cpu")
    expected, loss = _live(model, x), model(x)
    model.forward = forward
    without, (peak_without, _) = _live(model, x), _predicted(model, x)
    for device in ("cuda", "meta"):
        model.forward = _under(forward, device)
        with_own_regions(model)
        assert _live(model, x) == expected != without
        torch.testing.assert_close(model(x), loss, rtol=0, atol=0)
        peak, casts = _predicted(model, x)
        assert len(casts) == 4 + 1 + 1
        assert peak - expected[1] == peak_without - without[1]


def test_regions_are_restored_afterwards() -> None:
    with regions_of_cuda():
        region = torch.autocast("cuda", SHORT)
        of_cpu = torch.autocast("cpu", SHORT)
    x = torch.rand(2, 2)
    with region:  # Without a GPU torch does nothing.
        assert (x @ x).dtype == LONG
    with of_cpu:
        assert (x @ x).dtype == SHORT
    with regions_of_cuda(), region, torch.autocast("cuda", enabled=False):
        assert (x @ x).dtype == LONG


def test_a_step_has_the_memory_of_one_under_cpu_autocast() -> None:
    model, x = _step()
    forward = model.forward

    def under_cpu(x: Tensor) -> Tensor:
        with torch.autocast("cpu", SHORT):
            result: Tensor = forward(x)
            return result

    model.forward = under_cpu
    expected = _live(model, x)
    model.forward = forward
    without, (peak_without, _) = _live(model, x), _predicted(model, x)
    autocast(model, SHORT)
    assert _live(model, x) == expected != without

    peak, casts = _predicted(model, x)
    # Weights and biases of two layers, each once; the input; the value read by the loss.
    assert len(casts) == 4 + 1 + 1
    # The CPU's backward of the loss creates another tensor, with and without casts.
    assert peak - expected[1] == peak_without - without[1]
