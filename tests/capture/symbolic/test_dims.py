"""Dimensions that grow, found by comparing shapes."""

from collections.abc import Callable

import pytest

from fxpart.capture.symbolic.dims import SymbolicDim, affine_dims
from fxpart.errors import CaptureError, SpecError


def test_multiples_and_constants_are_found() -> None:
    shapes = {b: [(b, 7), None, (3 * b,), (5, 2 * b + 1), (4,)] for b in (2, 3, 6)}
    assert affine_dims("batch", shapes) == (
        SymbolicDim(0, 0, "batch"),
        SymbolicDim(2, 0, "batch", 3),
        SymbolicDim(3, 1, "batch", 2, 1),
    )


def test_constant_dimensions_are_not_symbolic() -> None:
    assert affine_dims("batch", {b: [(7,), None] for b in (2, 3, 4)}) == ()


@pytest.mark.parametrize("size", [lambda b: b * b, lambda b: 9 - b, lambda b: b // 2])
def test_other_growth_is_refused(size: Callable[[int], int]) -> None:
    shapes = {b: [(size(b),)] for b in (2, 3, 6)}
    with pytest.raises(CaptureError, match=r"dimension 0 of input 0 is .* not a multiple"):
        affine_dims("batch", shapes)


def test_inputs_that_depend_on_the_size_are_refused() -> None:
    for other in ([(2,), (2,)], [(2, 1)], [None]):
        shapes = {2: [(2,)], 3: other, 4: [(4,)]}
        with pytest.raises(
            CaptureError, match=("the inputs at batch=3 differ from those at batch=2")
        ):
            affine_dims("batch", shapes)


def test_a_dimension_that_shrinks_is_not_symbolic() -> None:
    with pytest.raises(SpecError, match="a factor of 1 or more"):
        SymbolicDim(0, 0, "batch", 0)
