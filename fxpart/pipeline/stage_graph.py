"""Some nodes of a flat graph made into a module of their own."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, fx, nn
from torch.fx.graph import _PyTreeCodeGen, _PyTreeInfo

from fxpart.pipeline.flat_graph import FlatGraph, copied
from fxpart.split.deferred import DeferredGraphModule

__all__ = ["entry_module", "result_module", "stage_module"]


def stage_module(
    flat: FlatGraph,
    nodes: Iterable[fx.Node],
    inputs: Sequence[fx.Node],
    outputs: Sequence[fx.Node],
) -> fx.GraphModule:
    """Return a module that takes `inputs` by position, computes `nodes` and returns `outputs`."""
    graph, env = _copied(inputs, nodes)
    graph.output(tuple(env[node] for node in outputs))
    return DeferredGraphModule(_holder(flat.attributes, graph), graph, "Stage")


def result_module(
    flat: FlatGraph, nodes: Iterable[fx.Node], inputs: Sequence[fx.Node]
) -> fx.GraphModule:
    """Return a module that puts together what the flat graph returns, from `inputs`."""
    graph, _ = _copied(inputs, nodes)
    return fx.GraphModule(_holder(flat.attributes, graph), graph, "Result")


def entry_module(
    flat: FlatGraph,
    split: fx.GraphModule,
    nodes: Iterable[fx.Node],
    outputs: Sequence[fx.Node],
    fixed: Sequence[fx.Node],
) -> fx.GraphModule:
    """Return a module called as `split` is, that returns `outputs` and the inputs in `fixed`."""
    graph, env = _copied((), nodes)
    for guard in flat.guards:
        copied(graph, guard, env)
    graph.output((tuple(env[n] for n in outputs), tuple(env[n] for n in fixed)))
    codegen = split.graph._codegen
    if isinstance(codegen, _PyTreeCodeGen):
        info = codegen.pytree_info
        graph.set_codegen(_PyTreeCodeGen(_PyTreeInfo(info.orig_args, info.in_spec, None)))
    return fx.GraphModule(_holder(flat.attributes, graph), graph, "Entry")


def _copied(
    inputs: Iterable[fx.Node], nodes: Iterable[fx.Node]
) -> tuple[fx.Graph, dict[fx.Node, fx.Node]]:
    """Return a graph of `inputs` as placeholders and of `nodes`, and the copy of each."""
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    for node in inputs:
        env[node] = graph.placeholder(node.name)
        env[node].meta.update(node.meta)
    for node in nodes:
        env[node] = copied(graph, node, env)
    return graph, env


def _holder(attributes: Mapping[str, Any], graph: fx.Graph) -> nn.Module:
    """Return a module that has what the nodes of `graph` name, under the same paths."""
    root = nn.Module()
    used = {str(n.target) for n in graph.nodes if n.op in {"get_attr", "call_module"}}
    # What holds others comes first: a weight of a module that is there itself is there already.
    for path in sorted(used, key=lambda path: (path.count("."), path)):
        *prefix, name = path.split(".")
        parent = root
        for part in prefix:
            if not hasattr(parent, part):
                setattr(parent, part, nn.Module())
            parent = getattr(parent, part)
        _put(parent, name, attributes[path])
    return root


def _put(parent: nn.Module, name: str, value: Any) -> None:  # noqa: ANN401 - weight, module, ...
    if getattr(parent, name, None) is value:
        return
    if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
        parent.register_buffer(name, value)
    else:
        setattr(parent, name, value)
