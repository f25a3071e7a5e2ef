"""Differences between two results: NaN, other shapes, other structures."""

import math

import pytest
import torch

from fxpart.execution.difference import (
    gradient_share,
    largest_magnitude,
    loss_share,
    max_difference,
    nan_elements,
    result_share,
    rounding,
)

NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("result", "reference", "apart"),
    [
        ([1.0, 2.0], [1.0, 2.0], 0.0),
        ([1.0, 2.5], [1.0, 2.0], 0.5),
        ([-3.0, 2.0], [1.0, 2.0], 4.0),
        ([NAN, 2.0], [NAN, 2.0], 0.0),
        ([NAN, 2.0], [1.0, 2.0], INF),
        ([1.0, 2.0], [NAN, 2.0], INF),
        ([INF, -INF], [INF, -INF], 0.0),
        ([INF, 0.0], [1.0, 0.0], INF),
        ([INF, 0.0], [-INF, 0.0], INF),
        ([0.0], [-0.0], 0.0),
        ([], [], 0.0),
    ],
)
def test_the_difference_of_elements(
    result: list[float], reference: list[float], apart: float
) -> None:
    assert max_difference(torch.tensor(result), torch.tensor(reference)) == apart


def test_integers_booleans_and_complex_numbers() -> None:
    # In float32 these two would be equal.
    big = torch.tensor([2**24, 5])
    assert max_difference(big + 1, big) == 1.0
    assert max_difference(torch.tensor([True]), torch.tensor([False])) == 1.0
    assert max_difference(torch.tensor([3 + 4j]), torch.tensor([0j])) == 5.0


def test_the_largest_difference_of_several_leaves_counts() -> None:
    a, b = torch.zeros(2), torch.ones(1)
    assert max_difference({"a": a, "b": (b, 3)}, {"a": a, "b": (b + 2, 3)}) == 2.0


@pytest.mark.parametrize(
    ("result", "reference"),
    [
        (torch.zeros(2), torch.zeros(3)),
        (torch.zeros(2), torch.zeros(2, dtype=torch.float64)),
        ((torch.zeros(2),), [torch.zeros(2)]),
        ((torch.zeros(2), None), (torch.zeros(2),)),
        ((torch.zeros(2), 1), (torch.zeros(2), 2)),
        ((torch.zeros(1), 1), (torch.zeros(1), torch.ones(1))),
    ],
)
def test_another_structure_is_infinitely_far(result: object, reference: object) -> None:
    assert max_difference(result, reference) == INF


def test_the_magnitude_ignores_infinite_elements() -> None:
    assert largest_magnitude((torch.tensor([-3.0, NAN, INF]), torch.tensor([2]), "x")) == 3.0
    assert largest_magnitude((torch.empty(0), 7)) == 0.0


def test_rounding_is_half_of_the_digits_of_the_coarsest_dtype() -> None:
    fine, coarse = torch.zeros(1), torch.zeros(1, dtype=torch.bfloat16)
    assert rounding(fine) == pytest.approx(2**-11.5)
    assert rounding((fine, coarse)) == pytest.approx(2**-3.5)
    assert rounding(torch.zeros(1, dtype=torch.int64)) == 0.0


def test_booleans_and_complex_numbers_have_a_magnitude() -> None:
    assert largest_magnitude((torch.tensor([True, False]), torch.tensor([-3.0]))) == 3.0
    assert largest_magnitude(torch.tensor([True])) == 1.0
    assert largest_magnitude(torch.tensor([3.0 + 4.0j])) == 5.0
    assert largest_magnitude(torch.zeros(0, dtype=torch.bool)) == 0.0


def _noise(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).to(dtype)


def _reordered(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a product, and the same with its sums in the opposite order."""
    # A sum of halves, so that each element is rounded at other places.
    half = a.shape[1] // 2
    return a @ b, a[:, half:].flip(1) @ b[half:].flip(0) + a[:, :half].flip(1) @ b[:half].flip(0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(64, 512, 64), (1, 4096, 512), (512, 64, 1), (3, 4096, 4)])
def test_reordered_sums_are_within_rounding(
    dtype: torch.dtype, shape: tuple[int, int, int]
) -> None:
    rows, terms, columns = shape
    one, other = _reordered(_noise(rows, terms, dtype=dtype), _noise(terms, columns, dtype=dtype))
    assert max_difference(other, one) > 0
    assert result_share(other, one) < rounding(one)
    # With rectified zeros, in one order only, and one example much larger than the others.
    bigger = torch.cat([one, one[:1] * 2**14]), torch.cat([other, other[:1] * 2**14])
    assert result_share(bigger[1].relu(), bigger[0].relu()) < rounding(one)
    # Probabilities, of which most are small.
    spread = 10 / float(one.float().std())
    assert result_share((other * spread).softmax(-1), (one * spread).softmax(-1)) < rounding(one)
    assert gradient_share({"w": other}, {"w": one}) < rounding(one)


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("large", [1e4, 1e12, INF])
def test_large_elements_do_not_hide_wrong_ones(dim: int, large: float) -> None:
    right = _noise(8, 8)
    beside = torch.full_like(right, large)
    reference, wrong = (torch.cat([part, beside], dim) for part in (right, right + 0.1))
    assert result_share(wrong, reference) > 10 * rounding(reference)
    assert result_share((wrong, beside), (reference, beside)) == result_share(wrong, reference)
    assert result_share(reference.clone(), reference) == 0.0


def test_another_modules_gradients_do_not_hide_a_wrong_one() -> None:
    right, huge = _noise(8, 8) * 1e-6, _noise(8, 8) * 1e6
    wanted = {"a.weight": right, "a.bias": right[0], "b.weight": huge, "b.bias": huge[0]}
    assert gradient_share(wanted | {"a.weight": right * 2}, wanted) > 0.1
    # A module of a single weight is judged by the module around it.
    noise = torch.full((8,), 1e-7)
    wanted = {"net.shift.bias": noise, "net.b.weight": _noise(8, 8), "head.weight": huge}
    assert 0 < gradient_share(wanted | {"net.shift.bias": -noise}, wanted) < rounding(noise)


def test_unequal_integers_are_never_rounding() -> None:
    places, values = torch.tensor([7, 10**6]), torch.tensor([1e12, 1.0])
    assert result_share((places + 1, values), (places, values)) == 1.0
    empty = torch.empty(0, 0)
    assert result_share((places, empty, 2 * values), (places, empty, values)) == 1.0


def test_a_loss_is_relative_to_the_result_it_is_the_mean_of() -> None:
    centred = (torch.tensor([7]), torch.tensor([-1.0, 1.0]))
    assert loss_share(2e-7, 1e-7, centred) == pytest.approx(1e-7)
    assert loss_share(2e-7, 1e-7, ()) == pytest.approx(1.0)
    assert loss_share(1e-7, 0.0, ()) == 1.0
    assert loss_share(NAN, NAN, ()) == 0.0
    assert loss_share(NAN, 1.0, centred) == INF


def test_nan_are_counted() -> None:
    assert (
        nan_elements((torch.tensor([NAN, 1.0, INF]), [torch.tensor(NAN), torch.ones(2) > 0])) == 2
    )
