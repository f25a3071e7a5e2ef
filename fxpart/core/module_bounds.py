"""Module boundaries in a graph: the points at which torch's pipelines can split."""

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
    """Return the modules whose operators are all consecutive, as from a single call.

    Modules without operators of their own are left out: a module list, for example, is never
    called.
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
    modules: Sequence[str], index: int, calls: Container[str], used_paths: Container[str]
) -> tuple[str, SplitPlace] | None:
    """Return the outermost module that begins at operator `index` or ends just before it.

    None if there is no such module in `calls`, or the module that ends is in `used_paths`.

    Args:
        modules: module of each operator, in graph order.
        index: an operator other than the first.
        calls: modules that are called once, see `single_calls`.
        used_paths: modules already used as split points.

    """
    before, after = modules[index - 1], modules[index]
    for path in reversed(parents(after)):
        if path in calls and not is_within(before, path):
            return path, "BEGINNING"
    for path in reversed(parents(before)):
        if path in calls and path not in used_paths and not is_within(after, path):
            return path, "END"
    return None
