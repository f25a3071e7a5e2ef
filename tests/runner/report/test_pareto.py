"""The Pareto frontier."""

from hypothesis import given
from hypothesis import strategies as st

from runner.report.ranking import frontier

POINTS = st.lists(st.tuples(*[st.integers(0, 5)] * 3), max_size=30)


def test_a_frontier_by_hand() -> None:
    points = [(1.0, 9.0), (2.0, 5.0), (2.0, 6.0), (3.0, 5.0), (9.0, 1.0), (1.0, 9.0)]
    assert frontier(points) == [True, True, False, False, True, True]
    assert frontier([]) == []


@given(POINTS)
def test_it_is_what_the_definition_says(points: list[tuple[int, int, int]]) -> None:
    expected = [
        not any(
            all(o <= m for o, m in zip(other, mine, strict=True)) and other != mine
            for other in points
        )
        for mine in points
    ]
    assert frontier(points) == expected
