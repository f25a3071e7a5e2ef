"""A split module as one graph again, in which every node knows its stage.

`split_module` makes children ``submod_0``, ``submod_1``, ... and a graph on top that calls them,
takes their results apart and hands them weights. Here the children are put back in line, so that
what crosses from one stage to another can be read off one list of nodes.
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
"""Where a split module keeps, in its ``meta``, the original path of each renamed one."""

_STAGE = re.compile(r"submod_(\w*_)?\d+")


@dataclass(frozen=True, eq=False, slots=True)
class FlatGraph:
    """The nodes of all stages in one order of execution.

    Inputs are before the first stage (-1), the result behind the last (`n_stages`). A ``get_attr``
    has no stage: whoever needs a weight has it.
    """

    graph: fx.Graph
    stage_of: dict[fx.Node, int]
    attributes: dict[str, Any]
    """What the targets of ``get_attr`` and ``call_module`` nodes are."""
    guards: list[fx.Node]
    """Nodes that only check the inputs; they are in no stage."""
    stage_names: tuple[str, ...]
    """Name of the child that each stage was."""

    @property
    def n_stages(self) -> int:
        """Number of stages."""
        return len(self.stage_names)

    @property
    def output(self) -> fx.Node:
        """The node that returns the result."""
        return self.graph.output_node()


def copied(graph: fx.Graph, node: fx.Node, env: Mapping[fx.Node, Any]) -> fx.Node:
    """Add a copy of `node` to `graph`, in which its operands are those in `env`, and return it."""
    copy = graph.create_node(node.op, node.target, name=node.name, type_expr=node.type)
    # Arguments given at once are searched for symbolic sizes, which takes as long as all the rest.
    copy.args = fx.map_arg(node.args, env.__getitem__)
    if node.kwargs:
        copy.kwargs = fx.map_arg(node.kwargs, env.__getitem__)
    copy.meta.update(node.meta)
    return copy


def stage_children(split: fx.GraphModule) -> tuple[str, ...]:
    """Return the names of the children that are stages, in the order of their numbers.

    Raises:
        SpecError: when there is none, or one is called more than once.

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

    Weights and leaf modules stay the same objects. They are under their original paths where
    ``split.meta`` has a map of them (`QUALNAME_MAP`).

    Raises:
        SpecError: when `split` has no stages, or calls one twice.

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
    """Whose nodes are copied: a stage's, or with stage None those on top."""

    module: fx.GraphModule
    stage: int | None
    name: str
    paths: dict[str, str]


def _inline(flat: FlatGraph, part: _Part, call: fx.Node, outer: dict[fx.Node, Any]) -> Any:  # noqa: ANN401 - nodes, nested as the stage returns them
    """Copy the nodes of a stage that `call` calls, and return what it returns."""
    args, kwargs = fx.map_arg((call.args, dict(call.kwargs)), lambda n: outer[n])
    given = iter(args)
    env: dict[fx.Node, Any] = {}
    for node in part.module.graph.nodes:
        if node.op == "placeholder":
            default = kwargs[node.target] if node.target in kwargs else next(iter(node.args), None)
            env[node] = next(given, default)
        elif node.op == "output":
            return fx.map_arg(node.args[0], lambda n: env[n])
        else:
            _step(flat, part, node, env)
    return None


def _step(flat: FlatGraph, part: _Part, node: fx.Node, env: dict[fx.Node, Any]) -> None:
    """Copy one node, or take apart what a stage returned."""
    if node.op == "call_function" and node.target is operator.getitem:
        whole: Any = fx.map_arg(node.args[0], lambda n: env[n])
        if isinstance(whole, (tuple, list, dict)):
            env[node] = whole[node.args[1]]  # type: ignore[index]
            return
    env[node] = copy = copied(flat.graph, node, env)
    if node.op in {"get_attr", "call_module"}:
        copy.target = _path(flat, part, str(node.target))
    if is_guard(copy):
        flat.guards.append(copy)
    elif node.op != "get_attr":
        flat.stage_of[copy] = _loose_stage(flat, copy) if part.stage is None else part.stage


def _path(flat: FlatGraph, part: _Part, target: str) -> str:
    """Return the path under which the flat graph has what `target` is in `part`."""
    value = fetched(part.module, target)
    path = part.paths.get(f"{part.name}.{target}", target)
    if flat.attributes.setdefault(path, value) is not value:
        path = f"{part.name}.{target}"
        flat.attributes[path] = value
    return path


def _loose_stage(flat: FlatGraph, node: fx.Node) -> int:
    """Return the stage of a node that stands beside the stages: where its last operand is made."""
    if node.op == "placeholder":
        return -1
    if node.op == "output":
        return flat.n_stages
    return max([0, *(flat.stage_of.get(n, -1) for n in node.all_input_nodes)])
