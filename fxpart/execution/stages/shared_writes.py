"""Find values that cross stages, and refuse in-place writes that would be lost between processes.

Within one process, a tensor and its views share memory. Each is sent to another process as a copy,
where a write into one of them does not reach the others. Certain writes of this kind are refused;
writes inside functions and modules that are not torch's are unknown.
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


# Values that cross stages, each boundary in turn:
#
#     stage 0             stage 1         stage 2
#     makes a, b   a, b   makes c   a, c  reads a, c       stage 1 forwards `a`


@dataclass(frozen=True, eq=False, slots=True)
class Crossings:
    """The nodes of every stage, and the values that cross each stage boundary.

    ``nodes`` has an extra entry at each end: the first computes the inputs of stage 0 from those of
    the model, the last the result of the model from the outputs of the last stage.
    """

    nodes: tuple[tuple[fx.Node, ...], ...]
    """Nodes to compute, in order, including weights and recomputed numbers. Length n_stages + 2."""
    boundaries: tuple[tuple[fx.Node, ...], ...]
    """``boundaries[i]`` holds the inputs of stage i; the last entry, the outputs of the last stage.
    Length n_stages + 1."""


def crossings(flat: FlatGraph, scalars: set[fx.Node]) -> Crossings:
    """Return the values that cross each boundary of `flat`; `scalars` are recomputed where used.

    Raises:
        CycleError: if a stage reads from a later one.

    """
    order = {node: position for position, node in enumerate(flat.graph.nodes)}
    members: list[list[fx.Node]] = [[] for _ in range(flat.n_stages + 2)]
    for node in order:
        if node in flat.stage_of and node not in scalars:
            members[flat.stage_of[node] + 1].append(node)
    last_use: dict[fx.Node, int] = {}
    nodes: list[tuple[fx.Node, ...]] = []
    for index, placed in enumerate(members):
        stage = index - 1
        computed, read = _closure(placed, scalars, flat)
        nodes.append(tuple(sorted(computed, key=order.__getitem__)))
        for value in read:
            home = flat.stage_of[value]
            if home > stage:
                raise CycleError(
                    f"{flat.stage_names[stage]} uses {value.name}, which {flat.stage_names[home]}"
                    " makes after it; number the partitions so that none reads from a later one"
                )
            if home < stage:
                last_use[value] = max(last_use.get(value, -1), stage)
    crossing = sorted(last_use, key=order.__getitem__)
    boundaries = [
        tuple(v for v in crossing if flat.stage_of[v] < stage <= last_use[v])
        for stage in range(flat.n_stages + 1)
    ]
    # The tensors of the result come first, in order of appearance.
    returned = [node for node in flat.output.all_input_nodes if node in boundaries[-1]]
    boundaries[-1] = tuple(dict.fromkeys([*returned, *boundaries[-1]]))
    return Crossings(tuple(nodes), tuple(boundaries))


def _closure(
    placed: Iterable[fx.Node], scalars: set[fx.Node], flat: FlatGraph
) -> tuple[list[fx.Node], list[fx.Node]]:
    """Return the nodes `placed` in a stage, with the scalars and weights that they need.

    The second list holds the placed values that all of these read.
    """
    computed = dict.fromkeys(placed)
    queue, read = list(computed), dict[fx.Node, None]()
    while queue:
        for operand in queue.pop().all_input_nodes:
            if operand in scalars or operand not in flat.stage_of:
                if operand not in computed:
                    computed[operand] = None
                    queue.append(operand)
            else:
                read[operand] = None
    return list(computed), list(read)


# Writes in place.


def check_writes(flat: FlatGraph, passed: Crossings) -> None:
    """Refuse writes into memory that other stages would hold as a copy.

    Raises:
        CycleError: if an earlier stage reads memory after a write, or a later stage before it.
        SpecError: if a stage receives a tensor under two names and writes into it, or writes into
            a weight that another stage also uses.

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
        aliases = [v for v in passed.boundaries[stage] if memory.root(v) == root]
        if len(aliases) > 1:
            raise SpecError(
                f"{where} and takes it as {aliases[0].name} and as {aliases[1].name}, which"
                f" processes would hold apart; move {writer.name} into the stage that makes it"
            )
        for node, user in _uses(flat, memory, root):
            reader = flat.stage_of.get(user, stage)
            if reader == stage:
                continue
            name = flat.stage_names[reader] if 0 <= reader < flat.n_stages else "the result"
            if node.op == "get_attr":
                raise SpecError(f"{where}, which {name} uses too; put both in one stage")
            reads_after_write = position[user] > position[writer]
            if reads_after_write != (reader > stage) and not is_question(user):
                moment = "is there after" if reads_after_write else "was there before"
                raise CycleError(f"{where}, and {name} uses what {moment}; put both in one stage")


def _writes(
    module: fx.GraphModule, ops: Iterable[fx.Node], memory: SharedMemory
) -> list[tuple[fx.Node, fx.Node]]:
    """Return the writing nodes with their written operands, entering `ops` into `memory`."""
    written = []
    for node in ops:
        effects = effects_of(module, node)
        memory.enter(node, effects.shared)
        written += [(node, operand) for operand in effects.written]
    return written


def _is_known(node: fx.Node, flat: FlatGraph) -> bool:
    """Return whether a node is in a stage and its effects on memory are known."""
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
    """Yield pairs of a node that shares memory with `root` and one of its users, in order."""
    for node in flat.graph.nodes:
        if node.op != "output" and memory.root(node) == root:
            yield from ((node, user) for user in node.users)
