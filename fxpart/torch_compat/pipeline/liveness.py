"""`analyze_pipeline_module`: which tensors each stage uses, and which must be there when it starts.

submod_0 → a, b      uses x            live: x
submod_1(a) → c      uses submod_0.0   live: submod_0.0, submod_0.1
submod_2(b, c)       uses submod_0.1   live: submod_0.1, submod_1
submod_1
"""

import operator
from dataclasses import dataclass

from torch import fx

from fxpart.errors import SpecError
from fxpart.execution.stages.flat_graph import stage_children

__all__ = ["PipelineAnalysis", "analyze_pipeline_module"]

PipelineAnalysis = tuple[dict[int, list[str]], dict[int, str], dict[int, list[str]]]
"""Names of the tensors that each stage uses, name of each stage, and what is live before each."""


@dataclass(frozen=True, eq=False, slots=True)
class _Value:
    """A tensor on top of a split module: an input, or what a stage returned, or an item of it."""

    name: str
    maker: str
    """Name of the stage, or "" for an input."""


def analyze_pipeline_module(top: fx.GraphModule) -> PipelineAnalysis:
    """Return ``(stage_id_to_arg_names, stage_id_to_name, liveness)`` of a split module.

    Stages are numbered from 0 in the order of their names. An input of the model has the name of
    its parameter, the result of a stage that of the stage, and an item of it also its number, as in
    ``submod_1.0``. Weights that are passed from the top are no tensors that cross, and left out.

    ``liveness[i]`` begins with what stage i uses, and goes on with what it only passes on, to a
    later stage or into the model's result. ``liveness[-1]`` is the inputs of the model, in order;
    `liveness[0]` has that order as well when it is the same tensors.

    Raises:
        SpecError: when `top` has no stages, or computes anything beside them.

    """
    names = stage_children(top)
    values = _values(top, names)
    used = {
        str(node.target): _used(node, values)
        for node in top.graph.nodes
        if node.op == "call_module" and node.target in names
    }
    liveness: dict[int, list[str]] = {}
    later = _used(top.graph.output_node(), values)
    for stage in reversed(range(len(names))):
        own = used[names[stage]]
        passed_on = [value for value in later if value.maker != names[stage]]
        later = list(dict.fromkeys([*own, *passed_on]))
        liveness[stage] = [value.name for value in later]
    inputs = [str(node.target) for node in top.graph.find_nodes(op="placeholder")]
    if set(liveness[0]) == set(inputs):
        liveness[0] = list(inputs)
    return (
        {stage: [value.name for value in used[name]] for stage, name in enumerate(names)},
        dict(enumerate(names)),
        {-1: inputs, **{stage: liveness[stage] for stage in range(len(names))}},
    )


def _values(top: fx.GraphModule, names: tuple[str, ...]) -> dict[fx.Node, _Value]:
    """Return what each node on top of a split module is, weights left out."""
    values: dict[fx.Node, _Value] = {}
    for node in top.graph.nodes:
        if node.op == "placeholder":
            values[node] = _Value(str(node.target), "")
        elif node.op == "call_module" and node.target in names:
            values[node] = _Value(str(node.target), str(node.target))
        elif node.target is operator.getitem:
            whole = values[node.args[0]]
            values[node] = _Value(f"{whole.name}.{node.args[1]}", whole.maker)
        elif node.op not in {"get_attr", "output"} and node.users:
            raise SpecError(
                f"{node.name} ({node.target}) is computed beside the stages {names[0]} to"
                f" {names[-1]}; put it into one of them"
            )
    return values


def _used(node: fx.Node, values: dict[fx.Node, _Value]) -> list[_Value]:
    """Return the tensors that `node` takes, each once, in order."""
    taken: list[fx.Node] = []
    fx.map_arg((node.args, node.kwargs), taken.append)
    return [values[n] for n in dict.fromkeys(taken) if n in values]
