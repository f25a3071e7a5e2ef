"""Differences between two results: NaN, other shapes, other structures."""

import math

import pytest
import torch

from fxpart.execution.difference import largest_magnitude, max_difference, rounding

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
