"""Writes in place that stages in processes of their own would not see of each other.

In one process, a tensor and its views are one memory. Between processes each arrives as a copy: a
stage that then writes into one of them leaves the others as they were. What is surely so is
refused; what a module or function of others does inside is not known here.
"""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, fx, nn

from fxpart.errors import CycleError, SpecError
from fxpart.pipeline.crossings import Crossings
from fxpart.pipeline.flat_graph import FlatGraph
from fxpart.split.deferred import DeferredGraphModule
from fxpart.split.effects import effects_of, is_question
from fxpart.split.memory import SharedMemory, Value
from fxpart.split.memory_names import KNOWN_MODULES
from fxpart.split.write_order import writes_in_place

__all__ = ["check_writes"]


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
