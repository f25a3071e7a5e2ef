"""Every kind of difference between two answers."""

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
    answer = solve(TORCH, case, Question("size_based"))
    first, second = answer.partitions
    refused = Answer(1.0, answer.total_bytes, error="RuntimeError: no", runtime_error=True)
    counted = replace(answer, total_bytes=1, partitions=(replace(first, used_bytes=1), second))
    otherwise = replace(answer, partitions=counted.partitions)
    swapped = (replace(first, number=1), replace(second, number=0))
    numbers = {name: 1 - number for name, number in answer.partition_of.items()}
    numbered = replace(
        answer, partitions=swapped[::-1], partition_of=numbers, emitted=dict(numbers)
    )
    moved = replace(
        answer, partitions=(replace(first, devices=(1,)), replace(second, devices=(0,)))
    )
    nowhere = replace(answer, partitions=(replace(first, devices=()), second))
    for expected, theirs, ours in (
        ("same answer", answer, answer),
        ("both refuse", refused, refused),
        ("torch invalid", nowhere, answer),
        ("torch invalid", nowhere, refused),
        ("torch refuses, ours valid", refused, answer),
        ("bytes counted otherwise", answer, counted),
        ("numbered otherwise", answer, numbered),
        ("ours refuses", answer, refused),
        ("ours invalid", answer, nowhere),
        ("bytes counted otherwise", answer, replace(refused, total_bytes=1)),
        ("other", answer, moved),
        ("other", answer, otherwise),
        ("other", refused, replace(refused, runtime_error=False)),
        ("other", answer, replace(answer, same_outputs=False)),
        ("other", answer, replace(answer, emitted=dict.fromkeys(case.operators, 0))),
    ):
        assert reason(case, theirs, ours)[0] == expected
