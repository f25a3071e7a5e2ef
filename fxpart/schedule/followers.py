"""What in a pipeline waits for what."""

from collections.abc import Sequence

from fxpart.schedule.costs import StageCost, StageLink

__all__ = ["followers"]


def followers(
    costs: Sequence[StageCost], links: Sequence[StageLink]
) -> list[list[tuple[int, StageLink | None]]]:
    """Return for each forward, then each backward, what waits for it, and by which link if any.

    A forward of stage s is number s, a backward number s + the number of stages.
    """
    count = len(costs)
    found: list[list[tuple[int, StageLink | None]]] = [[] for _ in range(2 * count)]
    for stage in range(count):
        # The backward of a stage needs what its forward saved.
        found[stage].append((count + stage, None))
        if stage + 1 < count:
            found[stage].append((stage + 1, None))
            found[count + stage + 1].append((count + stage, None))
    for link in links:
        first = 0 if link.kind == "F" else count
        found[first + link.source].append((first + link.target, link))
    return found
