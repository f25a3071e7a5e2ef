"""Where in a graph a module begins or ends: the places at which torch's pipelines can cut."""

from collections import Counter
from collections.abc import Container, Sequence
from functools import lru_cache
from typing import Literal

from fxpart.core.module_paths import is_within, parents

__all__ = ["SplitPlace", "module_bound", "single_calls"]

SplitPlace = Literal["BEGINNING", "END"]
"""Names of the members of `torch.distributed.pipelining.SplitPoint`."""


@lru_cache(maxsize=4)
def single_calls(modules: tuple[str, ...]) -> frozenset[str]:
    """Return the modules whose operators all stand next to each other, as those of one call do.

    Only modules with operators of their own: a list of modules has none, and is never called.
    """
    first: dict[str, int] = {}
    last: dict[str, int] = {}
    count: Counter[str] = Counter()
    for index, module in enumerate(modules):
        for path in parents(module):
            first.setdefault(path, index)
            last[path] = index
            count[path] += 1
    return frozenset(path for path in modules if last[path] - first[path] + 1 == count[path])


def module_bound(
    modules: Sequence[str], index: int, calls: Container[str], taken: Container[str]
) -> tuple[str, SplitPlace] | None:
    """Return the outermost module that begins with operator `index`, or ends with the one before.

    None where there is none in `calls` but not in `taken`.

    Args:
        modules: of each operator, in the order of the graph.
        index: an operator that is not the first.
        calls: modules that are called once, see `single_calls`.
        taken: modules that are a place to cut already.

    """
    before, after = modules[index - 1], modules[index]
    for path in reversed(parents(after)):
        if path in calls and not is_within(before, path):
            return path, "BEGINNING"
    for path in reversed(parents(before)):
        if path in calls and path not in taken and not is_within(after, path):
            return path, "END"
    return None
