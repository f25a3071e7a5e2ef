"""Writes in place that stages in processes of their own would not see of each other.

In one process, a tensor and its views are one memory. Between processes each arrives as a copy: a
stage that then writes into one of them leaves the others as they were. What is surely so is
refused; what a module or function of others does inside is not known here.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, fx, nn

from fxpart.errors import CycleError, SpecError
from fxpart.execution.split.effects import (
    KNOWN_MODULES,
    SharedMemory,
    Value,
    effects_of,
    is_question,
)
from fxpart.execution.split.graph_module import DeferredGraphModule
from fxpart.execution.split.write_order import writes_in_place
from fxpart.execution.stages.flat_graph import FlatGraph

__all__ = ["Crossings", "check_writes", "crossings"]


# Which values each stage takes and hands on, so that a stage hears from the one before it only.
#
# stage 0         stage 1         stage 2
# makes a, b  →   a, b  →         a, c        `a` is passed on by stage 1, which may not use it


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


def check_writes(flat: FlatGraph, found: Crossings) -> None:
    """Refuse stages of which one writes into memory that it and others would hold apart.

    Raises:
        CycleError: when a stage uses what was there before, or is there after, a write of another
            whose number puts it on the wrong side of that.
        SpecError: when a stage takes a tensor that it writes into under two names, or writes into
            a weight that another stage uses too.

    """
    module = DeferredGraphModule(flat.attributes, flat.graph)
    ops = [node for node in flat.graph.nodes if _is_known(node, flat)]
    if not writes_in_place(module, ops):
        return
    memory = SharedMemory()
    for node in flat.graph.find_nodes(op="get_attr"):
        memory.hold(node, "weight", flat.attributes[str(node.target)])
    position = {node: index for index, node in enumerate(flat.graph.nodes)}
    for writer, operand in _writes(module, ops, memory):
        stage, root = flat.stage_of[writer], memory.root(operand)
        where = f"{flat.stage_names[stage]} writes into {operand.name} in place"
        takes = [v for v in found.boundaries[stage] if memory.root(v) == root]
        if len(takes) > 1:
            raise SpecError(
                f"{where} and takes it as {takes[0].name} and as {takes[1].name}, which processes"
                f" would hold apart; move {writer.name} into the stage that makes it"
            )
        for node, user in _uses(flat, memory, root):
            at = flat.stage_of.get(user, stage)
            if node.op == "get_attr" and at != stage:
                raise SpecError(f"{where}, which {_name(flat, at)} uses too; put both in one stage")
            after = position[user] > position[writer]
            if at != stage and after != (at > stage) and not is_question(user):
                then = "is there after" if after else "was there before"
                raise CycleError(
                    f"{where}, and {_name(flat, at)} uses what {then}; put both in one stage"
                )


def _name(flat: FlatGraph, stage: int) -> str:
    return flat.stage_names[stage] if 0 <= stage < flat.n_stages else "the result"


def _writes(
    module: fx.GraphModule, ops: Iterable[fx.Node], memory: SharedMemory
) -> list[tuple[fx.Node, fx.Node]]:
    """Return what writes in place into which operand; enters in `memory` what may share it."""
    written = []
    for node in ops:
        effects = effects_of(module, node)
        memory.enter(node, effects.shared)
        written += [(node, operand) for operand in effects.written]
    return written


def _is_known(node: fx.Node, flat: FlatGraph) -> bool:
    """Return whether a node is in a stage and what it does to the memory of its operands known."""
    if not node.op.startswith("call") or not 0 <= flat.stage_of.get(node, -1) < flat.n_stages:
        return False
    if node.op == "call_module":
        called = flat.attributes[str(node.target)]
        return type(called).__module__.startswith("torch.nn.modules") and not isinstance(
            called, (nn.Sequential, nn.ModuleList, nn.ModuleDict)
        )
    if node.op == "call_method":
        return hasattr(Tensor, str(node.target))
    if isinstance(node.target, torch._ops.OpOverload):
        return True
    module = str(getattr(node.target, "__module__", None) or "torch")
    return module.partition(".")[0] in KNOWN_MODULES


def _uses(flat: FlatGraph, memory: SharedMemory, root: Value) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Yield all that shares memory with `root`, each with the nodes that use it, in order."""
    for node in flat.graph.nodes:
        if node.op != "output" and memory.root(node) == root:
            yield from ((node, user) for user in node.users)
