"""The Pareto frontier: what nothing else beats in everything at once."""

from collections.abc import Sequence

__all__ = ["frontier"]


def frontier(points: Sequence[tuple[float, ...]]) -> list[bool]:
    """Return for each point whether it is Pareto-optimal: less is better in each coordinate.

    It is when no other point is as good in all coordinates and better in one; so equal points are
    optimal together. Takes time in proportion to the points by those on the frontier.
    """
    optimal = [False] * len(points)
    kept: list[tuple[float, ...]] = []
    # In lexicographic order what dominates a point comes before it, and by transitivity something
    # on the frontier does.
    for index in sorted(range(len(points)), key=points.__getitem__):
        point = points[index]
        if not any(_dominates(other, point) for other in kept):
            optimal[index] = True
            if not kept or kept[-1] != point:
                kept.append(point)
    return optimal


def _dominates(better: tuple[float, ...], worse: tuple[float, ...]) -> bool:
    return better != worse and all(b <= w for b, w in zip(better, worse, strict=True))
