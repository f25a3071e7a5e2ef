"""Cut an fx module into one submodule for each partition."""

from collections.abc import Mapping

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.graph import CodeGen
from torch.fx.passes.split_module import split_module

from fxpart.partitioner.guards import is_guard

__all__ = ["emit"]


def _without(fx_module: GraphModule, left_out: set[Node]) -> tuple[GraphModule, dict[Node, Node]]:
    """Return a copy without some unused nodes, and the original of each node in it."""
    graph = Graph()
    copies: dict[Node, Node] = {}
    for node in fx_module.graph.nodes:
        if node not in left_out:
            copies[node] = graph.node_copy(node, lambda n: copies[n])
    return GraphModule(fx_module, graph), {copy: node for node, copy in copies.items()}


def _put_back(emitted: GraphModule, fx_module: GraphModule, guards: list[Node]) -> None:
    """Call the checks of the inputs in `emitted`, before any partition runs."""
    inputs = [n for n in fx_module.graph.nodes if n.op == "placeholder"]
    copies = [n for n in emitted.graph.nodes if n.op == "placeholder"]
    same = dict(zip(inputs, copies, strict=True))
    first = next(n for n in emitted.graph.nodes if n.op not in {"placeholder", "get_attr"})
    with emitted.graph.inserting_before(first):
        for guard in guards:
            emitted.add_submodule(str(guard.target), fx_module.get_submodule(str(guard.target)))
            emitted.graph.node_copy(guard, lambda n: same[n])


def emit(
    fx_module: GraphModule, torch_module: torch.nn.Module, node_to_partition: Mapping[Node, int]
) -> GraphModule:
    """Return a module with a child ``submod_<id>`` for each partition id.

    It takes and returns what `fx_module` does, nested inputs and outputs included. `fx_module`
    itself keeps its graph.
    """
    guards = [node for node in fx_module.graph.nodes if is_guard(node)]
    if guards:
        stripped, original = _without(fx_module, set(guards))
        emitted = split_module(stripped, torch_module, lambda n: node_to_partition[original[n]])
        _put_back(emitted, fx_module, guards)
    else:
        emitted = split_module(fx_module, torch_module, lambda n: node_to_partition[n])
    # How nested inputs are taken apart and the outputs put together.
    nested = type(fx_module.graph._codegen) is not CodeGen
    if nested:
        emitted.graph.set_codegen(fx_module.graph._codegen)
    if nested or guards:
        emitted.recompile()
    return emitted
