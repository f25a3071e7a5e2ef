"""Results of two processes on halves of a batch, compared with the analysis."""

import pytest

from benchmarks.batch_dim_run import Compared, compare
from tests.capture.batch_dim.tiny import lying, tiny


@pytest.fixture(scope="module")
def compared() -> tuple[list[Compared], list[Compared]]:
    (true, alone), (false, _) = compare([tiny, lying])
    assert alone == []
    return true, false


def test_every_answer_agrees_with_two_processes(
    compared: tuple[list[Compared], list[Compared]],
) -> None:
    true, _ = compared
    assert [row for row in true if row.verdict == "wrong"] == []
    # Values of every kind occurred.
    assert {row.dim for row in true if row.verdict == "right"} == {-2, -1, 0, 1}
    assert {row.outer for row in true} == {"1", "2"}
    assert {row.scale for row in true if row.dim == -2} == {0, 1}
    assert any(row.all_reduced for row in true)
    assert any(row.verdict == "not comparable" for row in true)


def test_false_answers_are_detected(compared: tuple[list[Compared], list[Compared]]) -> None:
    _, false = compared
    assert [row for row in false if row.verdict == "right"] == []
