"""Random arguments made valid: every rule, on a call that fails with its arguments at first."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fxpart.execution.profiling.valid_arguments import needs_validity, valid_arguments

aten = torch.ops.aten
FAR = torch.tensor([[40, 3], [17, 90]])
TABLE = torch.arange(12.0).reshape(4, 3)
LABELS = torch.tensor([7, 1, 30, 0])

CALLS: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]] = [
    (aten.embedding.default, (TABLE, FAR), {}),
    (aten.embedding_dense_backward.default, (torch.ones(2, 2, 3), FAR, 4, -1, False), {}),
    (aten.embedding_bag.default, (TABLE, FAR.flatten(), torch.tensor([9, 8])), {}),
    (aten.index.Tensor, (TABLE, [None, FAR]), {}),
    (aten.index_put.default, (TABLE, [FAR, FAR], torch.zeros(2, 2)), {}),
    (aten.index_select.default, (TABLE, 1, torch.tensor([5, 9])), {}),
    (aten.index_add.default, (TABLE, 0, torch.tensor([8, 9]), torch.ones(2, 3)), {}),
    (aten.gather.default, (TABLE, 1, FAR), {}),
    (aten.scatter_add.default, (TABLE, 1, FAR, torch.ones(2, 2)), {}),
    (aten.take.default, (TABLE, FAR), {}),
    (aten.one_hot.default, (FAR, 5), {}),
    (aten.cross_entropy_loss.default, (TABLE, LABELS), {}),
    (aten.nll_loss_forward.default, (TABLE, LABELS, None, 1, -100), {}),
    (aten.histc.default, (FAR, 4, 0, 3), {}),
    (aten.bernoulli.default, (TABLE - 5,), {}),
    (aten.multinomial.default, (TABLE - 5.5, 2), {}),
    (
        aten.max_pool2d_with_indices_backward.default,
        (torch.ones(1, 1, 1, 1), torch.ones(1, 1, 2, 2), [2, 2], [2, 2], [0, 0], [1, 1], False),
        {"indices": torch.tensor([[[[77]]]])},
    ),
]


@pytest.mark.parametrize(("call", "args", "kwargs"), CALLS, ids=[str(call[0]) for call in CALLS])
def test_a_refused_call_is_made_valid(
    call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    assert needs_validity(call)
    if "backward" not in str(call):  # these write out of bounds silently
        with pytest.raises((IndexError, RuntimeError)):
            call(*args, **kwargs)
    values, named = valid_arguments(call, args, kwargs)
    call(*values, **named)


def test_valid_arguments_are_unchanged() -> None:
    indices = torch.tensor([0, 3, 2])
    args, kwargs = valid_arguments(aten.embedding.default, (TABLE, indices), {})
    assert args[1] is indices
    assert kwargs == {}
    mask = torch.tensor([True, False, True, False])
    args, _ = valid_arguments(aten.index.Tensor, (TABLE, [mask]), {})
    assert args[1] == [mask]


def test_offsets_of_bags_are_increasing() -> None:
    offsets = torch.tensor([30, 2, 9, 1])
    args, _ = valid_arguments(aten.embedding_bag.default, (TABLE, FAR.flatten(), offsets), {})
    rising: Tensor = args[2]
    assert rising.tolist() == [0, 1, 2, 2]
    assert args[1].tolist() == [0, 3, 1, 2]


def test_other_operators_are_unchanged() -> None:
    assert not needs_validity(aten.add.Tensor)
    args, kwargs = (TABLE, FAR), {"alpha": 2}
    assert valid_arguments(aten.add.Tensor, args, kwargs) == (args, kwargs)
    assert not needs_validity(max)
