"""What autograd saves for results that the loss does not need, against real steps."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fxpart.capture.training.joint import joint_capture
from fxpart.core.phases import StepOptions
from fxpart.execution.real_step import step_peak_bytes
from tests.execution.scene import predicted_peaks

WIDTH = 64
ROW = WIDTH * 4
"""Bytes of a row of activations."""


class _Keeps(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # noqa: ANN401
        ctx.save_for_backward(x * 2)
        return x + 1

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # noqa: ANN401
        (twice,) = ctx.saved_tensors
        result: Tensor = gradient * twice
        return result


def _exps(x: Tensor) -> Tensor:
    """Return what three saved results lead to."""
    for _ in range(3):
        x = torch.exp(x)
    return x


def _second_result(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.relu(), _exps(x)


def _dropped(x: Tensor) -> Tensor:
    side = _exps(x)
    main = x + side.detach()
    del side
    return _exps(main)


def _held_by_a_sum(x: Tensor) -> Tensor:
    # A single number holds all that its gradient needs.
    side = _exps(x).sum()
    main = _exps(x)
    return main + side.detach()


def _rebound(x: Tensor) -> Tensor:
    side = _exps(x)
    side = _exps(side * 0 + 1)
    return (x - 1) * side.detach()


def _of_a_function(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.relu(), _Keeps.apply(_Keeps.apply(x))  # type: ignore[no-untyped-call]


def _straight_through(x: Tensor) -> Tensor:
    # A detached tensor holds no gradient's tensors.
    change = (_exps(x) - x).detach()
    return torch.exp(x + change)


def _detached_result(x: Tensor) -> tuple[Tensor, Tensor]:
    side = _exps(x)
    detached = side.detach()
    del side
    return _exps(x), detached


class _KeepsArgument(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # noqa: ANN401
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # noqa: ANN401
        return gradient * 2


def _arguments_of_functions(x: Tensor) -> tuple[Tensor, Tensor]:
    side = _KeepsArgument.apply(x)  # type: ignore[no-untyped-call]
    return _exps(x), _KeepsArgument.apply(side)  # type: ignore[no-untyped-call]


def _overwritten(x: Tensor) -> tuple[Tensor, Tensor]:
    argument = x * 1
    side = _KeepsArgument.apply(argument)  # type: ignore[no-untyped-call]
    argument.add_(1)
    return _exps(x), side


def _places_of_maxima(x: Tensor) -> tuple[Tensor, Tensor]:
    side = x[None]
    for _ in range(4):
        side = nn.functional.max_pool2d(side, 3, 1, 1)
    return x.relu(), side


def _returned_item(x: Tensor) -> tuple[Tensor, Tensor]:
    values, places = x.sort()
    del values
    return _exps(x), places


class _Model(nn.Module):
    def __init__(self, forward: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.then = forward

    def forward(self, x: Tensor) -> Any:  # noqa: ANN401
        return self.then(self.first(x))


def _predicted(model: nn.Module, x: Tensor) -> int:
    step = StepOptions(fused_attention=False, fused_dropout=False)
    graph = joint_capture(model, (x,), options=step).graph
    return predicted_peaks(graph, np.zeros(graph.n_ops, dtype=np.int64), 1)[0]


@pytest.mark.parametrize(
    "forward",
    [
        _second_result,
        _dropped,
        _held_by_a_sum,
        _rebound,
        _of_a_function,
        _straight_through,
        _detached_result,
        _arguments_of_functions,
        _overwritten,
        _places_of_maxima,
        _returned_item,
    ],
)
def test_peaks_are_those_of_a_step(forward: Callable[[Tensor], Any]) -> None:
    model, x = _Model(forward), torch.randn(1000, WIDTH)
    assert 0 <= step_peak_bytes(model, (x,)).peak_bytes - _predicted(model, x) <= 4  # of the loss


def test_a_second_result_holds_what_its_own_gradient_needs() -> None:
    x = torch.randn(1000, WIDTH)
    weights = (WIDTH + 1) * WIDTH * 4
    # The input, the layer's result, `relu` and three exponentials.
    assert _predicted(_Model(_second_result), x) == weights + 6 * 1000 * ROW
