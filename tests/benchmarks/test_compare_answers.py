"""Every class of difference between two answers."""

from dataclasses import replace

import pytest

from benchmarks.compare_answers import reason
from benchmarks.static_case import Case, equal_shares, make_case
from benchmarks.torch_families import chain
from benchmarks.two_sides import TORCH, Answer, Question, solve


@pytest.fixture(name="case")
def _case() -> Case:
    return make_case("four", chain(4), equal_shares(2), 1.0)


def test_differences_have_a_reason(case: Case) -> None:
    theirs = solve(TORCH, case, Question("size_based"))
    first, second = theirs.partitions
    refused = Answer(1.0, theirs.total_bytes, error="RuntimeError: no", runtime_error=True)
    counted = replace(theirs, total_bytes=1, partitions=(replace(first, used_bytes=1), second))
    otherwise = replace(theirs, partitions=counted.partitions)
    swapped = (replace(first, number=1), replace(second, number=0))
    numbers = {name: 1 - number for name, number in theirs.partition_of.items()}
    numbered = replace(
        theirs, partitions=swapped[::-1], partition_of=numbers, emitted=dict(numbers)
    )
    moved = replace(
        theirs, partitions=(replace(first, devices=(1,)), replace(second, devices=(0,)))
    )
    nowhere = replace(theirs, partitions=(replace(first, devices=()), second))
    for expected, his, mine in (
        ("same answer", theirs, theirs),
        ("both refuse", refused, refused),
        ("torch invalid", nowhere, theirs),
        ("torch invalid", nowhere, refused),
        ("torch refuses, ours valid", refused, theirs),
        ("bytes counted otherwise", theirs, counted),
        ("numbered otherwise", theirs, numbered),
        ("ours refuses", theirs, refused),
        ("ours invalid", theirs, nowhere),
        ("bytes counted otherwise", theirs, replace(refused, total_bytes=1)),
        ("other", theirs, moved),
        ("other", theirs, otherwise),
        ("other", refused, replace(refused, runtime_error=False)),
        ("other", theirs, replace(theirs, same_outputs=False)),
        ("other", theirs, replace(theirs, emitted=dict.fromkeys(case.operators, 0))),
    ):
        assert reason(case, his, mine)[0] == expected
