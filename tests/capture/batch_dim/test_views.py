"""Positions of the batch after views, against the elements themselves and against torch's rules."""

from math import prod

import numpy as np
import pytest
import sympy
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.tensor._ops._view_ops import DimSpec, InputDim, dim_maps

from fxpart.capture.batch_dim.extent import quotient, strides
from fxpart.capture.batch_dim.views import Moved, overlapping_dim, reshaped

SIZES = st.lists(st.integers(1, 4), min_size=1, max_size=4)


@st.composite
def _reshapes(draw: st.DrawFn) -> tuple[list[int], list[int], int]:
    """Return sizes with an even batch, other sizes of as many elements, and the batch dimension."""
    before = draw(SIZES)
    dim = draw(st.integers(0, len(before) - 1))
    before[dim] = 2 * draw(st.integers(1, 3))
    after: list[int] = []
    rest = prod(before)
    while rest > 1 and len(after) < 4:
        size = draw(st.sampled_from([d for d in range(1, rest + 1) if rest % d == 0]))
        after.append(size)
        rest //= size
    return before, [*after, rest], dim


@given(_reshapes())
@settings(max_examples=300, deadline=None)
def test_a_reshape_maps_parts_to_parts(case: tuple[list[int], list[int], int]) -> None:
    before, after, dim = case
    position = reshaped(before, after, Moved(dim))
    # Which of two processes has each element.
    owner = np.zeros(before, dtype=np.int64)
    owner[(slice(None),) * dim + (slice(before[dim] // 2, None),)] = 1
    seen = owner.reshape(after)
    expected = [
        (at, outer)
        for at, size in enumerate(after)
        for outer in range(1, size // 2 + 1)
        if size % (2 * outer) == 0 and np.array_equal(seen, _shared(after, at, outer))
    ]
    if position is not None and (after[position.dim] // int(position.outer)) % 2 == 0:
        assert (position.dim, position.outer) in expected
    else:
        assert expected == []


def _shared(
    sizes: list[int], dim: int, outer: int
) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
    line = np.arange(sizes[dim]) % (sizes[dim] // outer) >= sizes[dim] // outer // 2
    shape = [1] * len(sizes)
    shape[dim] = sizes[dim]
    return np.broadcast_to(line.astype(np.int64).reshape(shape), sizes)


def _inputs_of(spec: DimSpec) -> set[int]:
    inputs, pending = set[int](), [spec]
    while pending:
        part = pending.pop()
        if isinstance(part, InputDim):
            inputs.add(part.input_dim)
        pending.extend(part.inputs())
    return inputs


@given(_reshapes())
@settings(max_examples=300, deadline=None)
def test_the_dimension_is_one_to_which_torch_maps_the_batch(
    case: tuple[list[int], list[int], int],
) -> None:
    before, after, dim = case
    rules = dim_maps[Tensor.view](torch.empty(before, device="meta"), tuple(after))
    mapped = [at for at, rule in enumerate(rules) if dim in _inputs_of(rule)]
    position = reshaped(before, after, Moved(dim))
    at = overlapping_dim(before, after, Moved(dim)) if position is None else position.dim
    assert at in mapped


def test_symbols_are_divided_exactly() -> None:
    batch, length = sympy.symbols("s0 s1", positive=True, integer=True)
    assert quotient(6 * batch * length, 3 * batch) == 2 * length
    assert quotient(batch, 2) is None
    assert quotient(7, 2) is None
    assert quotient(7, 0) is None
    assert strides([batch, length, 5]) == [5 * length, 5, 1]
    flat = reshaped([batch, length, 5], [batch * length, 5], Moved(0))
    assert flat == Moved(0)
    assert reshaped([batch * length, 5], [batch, length, 5], Moved(0)) == Moved(0)
    assert reshaped([3, batch], [3 * batch], Moved(1)) == Moved(0, 3)


@pytest.mark.parametrize(("after", "dim"), [([4, 3], 0), ([12], 0), ([2, 6], 0)])
def test_a_batch_split_over_dimensions_overlaps_one(after: list[int], dim: int) -> None:
    assert overlapping_dim([3, 4], after, Moved(0)) == dim
