"""Which values each stage takes and hands on, so that a stage hears from the one before it only.

stage 0         stage 1         stage 2
makes a, b  →   a, b  →         a, c        `a` is passed on by stage 1, which may not use it
"""

from collections.abc import Iterable
from dataclasses import dataclass

from torch import fx

from fxpart.errors import CycleError
from fxpart.pipeline.flat_graph import FlatGraph

__all__ = ["Crossings", "crossings"]


@dataclass(frozen=True, eq=False, slots=True)
class Crossings:
    """What every stage computes, and what passes between them.

    ``nodes`` has one more entry than there are stages at each end: the first is what is done to the
    model's inputs before stage 0, the last is what makes its result of what the last stage returns.
    """

    nodes: tuple[tuple[fx.Node, ...], ...]
    """Nodes to compute, in order; weights and recomputed numbers included. Length n_stages + 2."""
    boundaries: tuple[tuple[fx.Node, ...], ...]
    """``boundaries[i]`` is what stage i takes; the last entry is what the last stage returns.
    Length n_stages + 1."""


def crossings(flat: FlatGraph, scalars: set[fx.Node]) -> Crossings:
    """Return what crosses each boundary of `flat`; `scalars` are computed again where used.

    Raises:
        CycleError: when a stage uses what a later one makes.

    """
    order = {node: position for position, node in enumerate(flat.graph.nodes)}
    members: list[list[fx.Node]] = [[] for _ in range(flat.n_stages + 2)]
    for node in order:
        if node in flat.stage_of and node not in scalars:
            members[flat.stage_of[node] + 1].append(node)
    last_use: dict[fx.Node, int] = {}
    nodes: list[tuple[fx.Node, ...]] = []
    for index, own in enumerate(members):
        stage = index - 1
        computed, taken = _closure(own, scalars, flat)
        nodes.append(tuple(sorted(computed, key=order.__getitem__)))
        for value in taken:
            home = flat.stage_of[value]
            if home > stage:
                raise _backwards(flat, value, stage)
            if home < stage:
                last_use[value] = max(last_use.get(value, -1), stage)
    crossing = sorted(last_use, key=order.__getitem__)
    boundaries = [
        tuple(v for v in crossing if flat.stage_of[v] < stage <= last_use[v])
        for stage in range(flat.n_stages + 1)
    ]
    boundaries[-1] = _in_order_of_result(flat, boundaries[-1])
    return Crossings(tuple(nodes), tuple(boundaries))


def _closure(
    own: Iterable[fx.Node], scalars: set[fx.Node], flat: FlatGraph
) -> tuple[list[fx.Node], list[fx.Node]]:
    """Return what a stage computes, scalars and weights it needs included, and what these use."""
    computed = dict.fromkeys(own)
    queue, taken = list(computed), dict[fx.Node, None]()
    while queue:
        for operand in queue.pop().all_input_nodes:
            if operand in scalars or operand not in flat.stage_of:
                if operand not in computed:
                    computed[operand] = None
                    queue.append(operand)
            else:
                taken[operand] = None
    return list(computed), list(taken)


def _in_order_of_result(flat: FlatGraph, values: tuple[fx.Node, ...]) -> tuple[fx.Node, ...]:
    """Return `values` with those first that the result is made of, as they stand in it."""
    returned = [node for node in flat.output.all_input_nodes if node in values]
    return tuple(dict.fromkeys([*returned, *values]))


def _backwards(flat: FlatGraph, value: fx.Node, stage: int) -> CycleError:
    maker = flat.stage_names[flat.stage_of[value]]
    return CycleError(
        f"{flat.stage_names[stage]} uses {value.name}, which {maker} makes after it; number the"
        " partitions so that none reads from a later one"
    )
