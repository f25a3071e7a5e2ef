"""Where the cuts are that are named by module paths: each after the last operator of its module."""

from collections.abc import Sequence

import numpy as np

from fxpart.errors import SpecError, nearest_names
from fxpart.graph import IntArray, OpGraph

__all__ = ["named_cuts"]


def named_cuts(graph: OpGraph, unit_of: IntArray, paths: Sequence[str]) -> list[int]:
    """Return the cuts after the modules at `paths`, as numbers of the units that they lie before.

    A cut that would divide operators that must share a device is moved behind them.

    Args:
        graph: the model, with n operators.
        unit_of: unit of each operator, from `fxpart.modes.stage_line`. Length n.
        paths: module paths at any depth, in the order of the model.

    Raises:
        SpecError: for a path that the model does not have, and for cuts that leave a stage empty:
            at the end of the model, twice at one place, or out of order.

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
    """Return the last forward operator of the module at `path`, and of those below it."""
    below = path + "."
    forward = range(graph.first_backward)
    mine = [op for op in forward if f"{graph.modules[op]}.".startswith(below)]
    if not mine or not path:
        prefixes = dict[str, None]()
        for of in dict.fromkeys(graph.modules):
            parts = of.split(".") if of else []
            prefixes |= dict.fromkeys(".".join(parts[: end + 1]) for end in range(len(parts)))
        near = nearest_names(path, prefixes) if prefixes else "it has no modules; give mode.stages"
        raise SpecError(f"mode.cut_after names {path!r}, which the model does not have; {near}")
    # The check of a result stays with what makes the result, though it stands in another module.
    is_check = graph.is_check
    made = [op for op in mine if not is_check[op]]
    return int(np.max(made or mine))
