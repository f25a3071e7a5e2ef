"""Cuts at module boundaries: after named modules, or wherever one begins or ends."""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from fxpart.core.graph import MOST_KEPT_GRAPHS, IntArray, OpGraph
from fxpart.core.module_bounds import module_bound, single_calls
from fxpart.errors import SpecError, nearest_names
from fxpart.placement.stages.stretch_bytes import Stretches

__all__ = ["cuts_by_depth", "named_cuts"]


@lru_cache(maxsize=MOST_KEPT_GRAPHS)
def cuts_by_depth(graph: OpGraph, stretches: Stretches) -> tuple[IntArray, ...]:
    """Return the cuts at module boundaries, for increasing depths of the module tree.

    Each array, from 0 to U, has the cuts at modules down to some depth; depths that add no cut are
    skipped. Modules that are called more than once do not count. `stretches` are of the finest row
    of units of `graph`.
    """
    forward = np.flatnonzero(~graph.is_check[: graph.first_backward])
    modules = [graph.modules[op] for op in forward.tolist()]
    calls = single_calls(tuple(modules))
    depths: dict[int, int] = {}
    first_op = stretches.units.first_op
    indices = np.searchsorted(forward, first_op).tolist()
    for cut, index in enumerate(indices[1:], start=1):
        bound = module_bound(modules, index, calls, ()) if 0 < index < len(modules) else None
        if bound:
            depths[cut] = bound[0].count(".") + 1
    return tuple(
        np.array(
            [0, *(cut for cut, cut_depth in depths.items() if cut_depth <= depth), len(first_op)]
        )
        for depth in sorted(set(depths.values()))
    )


def named_cuts(graph: OpGraph, unit_of: IntArray, paths: Sequence[str]) -> list[int]:
    """Return the cuts after the modules at `paths`, as indices of the next units.

    A cut that would separate operators that must share a device is moved after them.

    Args:
        graph: the model, with n operators.
        unit_of: unit of each operator, from `fxpart.placement.stages.line`. Length n.
        paths: module paths at any depth, in the order of the model.

    Raises:
        SpecError: if the model does not have a path, or a stage would be empty because a cut is at
            the end of the model, repeated or out of order.

    """
    cuts: list[int] = []
    for index, path in enumerate(paths):
        cut = int(unit_of[_last_op(graph, path)]) + 1
        if cut > int(unit_of.max()):
            raise SpecError(
                f"mode.cut_after names {path}, after which the model ends: nothing would be left"
                " for the stage behind it; leave it out"
            )
        if cuts and cut <= cuts[-1]:
            where = "at the same place as" if cut == cuts[-1] else "before"
            raise SpecError(
                f"mode.cut_after={','.join(paths)}: the cut after {path} is {where} the one after"
                f" {paths[index - 1]}; name modules in the order in which they end, each place once"
            )
        cuts.append(cut)
    return cuts


def _last_op(graph: OpGraph, path: str) -> int:
    """Return the last forward operator in the module at `path`, including submodules."""
    below = path + "."
    forward = range(graph.first_backward)
    ops = [op for op in forward if f"{graph.modules[op]}.".startswith(below)]
    if not ops or not path:
        prefixes = dict[str, None]()
        for module in dict.fromkeys(graph.modules):
            parts = module.split(".") if module else []
            prefixes |= dict.fromkeys(".".join(parts[: end + 1]) for end in range(len(parts)))
        near = nearest_names(path, prefixes) if prefixes else "it has no modules; give mode.stages"
        raise SpecError(f"mode.cut_after names {path!r}, which the model does not have; {near}")
    # A check stays with the producer of the result, even if it is in another module.
    is_check = graph.is_check
    non_checks = [op for op in ops if not is_check[op]]
    return int(np.max(non_checks or ops))
