"""`flatten`: merge a split module back into one graph, with the stage of every node.

`split_module` makes children ``submod_0``, ``submod_1``, ... and a graph that calls them, unpacks
their results and passes them weights. Here the children are inlined, so that the values that pass
between stages can be read from one list of nodes.
"""

import operator
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import fx

from fxpart.errors import SpecError
from fxpart.execution.split.graph_module import fetched, is_guard

__all__ = [
    "QUALNAME_MAP",
    "FlatGraph",
    "copied",
    "flatten",
    "stage_children",
]

QUALNAME_MAP = "qualname_map"
"""Key in a split module's ``meta`` for the map from renamed paths to the original ones."""

_STAGE = re.compile(r"submod_(\w*_)?\d+")


@dataclass(frozen=True, eq=False, slots=True)
class FlatGraph:
    """The nodes of all stages in order of execution.

    Inputs are in stage -1, the output in stage `n_stages`. A ``get_attr`` has no stage: a weight
    belongs to every stage that reads it.
    """

    graph: fx.Graph
    stage_of: dict[fx.Node, int]
    attributes: dict[str, Any]
    """Values of the targets of ``get_attr`` and ``call_module`` nodes."""
    guards: list[fx.Node]
    """Nodes that only check the inputs and are in no stage."""
    stage_names: tuple[str, ...]
    """Name of the child of each stage."""

    @property
    def n_stages(self) -> int:
        """Number of stages."""
        return len(self.stage_names)

    @property
    def output(self) -> fx.Node:
        """The node that returns the result."""
        return self.graph.output_node()


def copied(graph: fx.Graph, node: fx.Node, env: Mapping[fx.Node, Any]) -> fx.Node:
    """Add a copy of `node`, with the operands in `env`, to `graph`, and return it."""
    copy = graph.create_node(node.op, node.target, name=node.name, type_expr=node.type)
    # Set after creation, since `create_node` would search the arguments for symbolic sizes, which
    # doubles the time.
    copy.args = fx.map_arg(node.args, env.__getitem__)
    if node.kwargs:
        copy.kwargs = fx.map_arg(node.kwargs, env.__getitem__)
    copy.meta.update(node.meta)
    return copy


def stage_children(split: fx.GraphModule) -> tuple[str, ...]:
    """Return the names of the stage children, in the order of their numbers.

    Raises:
        SpecError: if there are none, or one is called more than once.

    """
    called = [str(n.target) for n in split.graph.nodes if n.op == "call_module"]
    stages = [name for name in called if _STAGE.fullmatch(name)]
    if not stages:
        have = ", ".join(name for name, _ in split.named_children()) or "none"
        raise SpecError(
            f"a split module calls children submod_0, submod_1, ...; this one has {have}; make it"
            " with split_module or generate_pipeline_partition"
        )
    twice = next((name for name in stages if stages.count(name) > 1), None)
    if twice:
        raise SpecError(f"{twice} is called {stages.count(twice)} times; a stage runs once a call")
    return tuple(sorted(stages, key=lambda name: int(name.rpartition("_")[2])))


def flatten(split: fx.GraphModule) -> FlatGraph:
    """Return the nodes of `split` and of its stages as one graph; `split` is not changed.

    Weights and leaf modules are the same objects, under their original paths if ``split.meta`` maps
    them (`QUALNAME_MAP`).

    Raises:
        SpecError: if `split` has no stages, or calls one twice.

    """
    names = stage_children(split)
    paths: dict[str, str] = split.meta.get(QUALNAME_MAP, {})
    flat = FlatGraph(fx.Graph(), {}, {}, [], names)
    stage_of_name = {name: index for index, name in enumerate(names)}
    env: dict[fx.Node, Any] = {}
    for node in split.graph.nodes:
        stage = stage_of_name.get(str(node.target)) if node.op == "call_module" else None
        child = fetched(split, str(node.target)) if stage is not None else None
        if stage is not None and isinstance(child, fx.GraphModule):
            env[node] = _inline(flat, _Part(child, stage, str(node.target), paths), node, env)
        else:
            _step(flat, _Part(split, stage, "", {}), node, env)
    return flat


@dataclass(frozen=True, eq=False, slots=True)
class _Part:
    """The module whose nodes are copied: a stage, or the split module if `stage` is None."""

    module: fx.GraphModule
    stage: int | None
    name: str
    paths: dict[str, str]


def _inline(flat: FlatGraph, part: _Part, call: fx.Node, outer: dict[fx.Node, Any]) -> Any:  # noqa: ANN401 - nodes, nested as the stage returns them
    """Copy the nodes of the stage that `call` calls, and return its result."""
    args, kwargs = fx.map_arg((call.args, dict(call.kwargs)), lambda n: outer[n])
    positional = iter(args)
    env: dict[fx.Node, Any] = {}
    for node in part.module.graph.nodes:
        if node.op == "placeholder":
            default = kwargs[node.target] if node.target in kwargs else next(iter(node.args), None)
            env[node] = next(positional, default)
        elif node.op == "output":
            return fx.map_arg(node.args[0], lambda n: env[n])
        else:
            _step(flat, part, node, env)
    return None


def _step(flat: FlatGraph, part: _Part, node: fx.Node, env: dict[fx.Node, Any]) -> None:
    """Copy one node, or unpack the results of a stage."""
    if node.op == "call_function" and node.target is operator.getitem:
        container: Any = fx.map_arg(node.args[0], lambda n: env[n])
        if isinstance(container, (tuple, list, dict)):
            env[node] = container[node.args[1]]  # type: ignore[index]
            return
    env[node] = copy = copied(flat.graph, node, env)
    if node.op in {"get_attr", "call_module"}:
        copy.target = _path(flat, part, str(node.target))
    if is_guard(copy):
        flat.guards.append(copy)
    elif node.op != "get_attr":
        flat.stage_of[copy] = _stage_of_outer(flat, copy) if part.stage is None else part.stage


def _path(flat: FlatGraph, part: _Part, target: str) -> str:
    """Return the flat graph's path of the attribute `target` of `part`, registering it there."""
    value = fetched(part.module, target)
    path = part.paths.get(f"{part.name}.{target}", target)
    if flat.attributes.setdefault(path, value) is not value:
        path = f"{part.name}.{target}"
        flat.attributes[path] = value
    return path


def _stage_of_outer(flat: FlatGraph, node: fx.Node) -> int:
    """Return the stage of a node of the split module itself: that of its last operand."""
    if node.op == "placeholder":
        return -1
    if node.op == "output":
        return flat.n_stages
    return max([0, *(flat.stage_of.get(n, -1) for n in node.all_input_nodes)])
