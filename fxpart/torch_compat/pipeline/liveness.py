"""`analyze_pipeline_module`: find the tensors used by each stage and those live before it.

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
"""Names of the tensors used by each stage, stage names, and tensors live before each stage."""


@dataclass(frozen=True, eq=False, slots=True)
class _Value:
    """A tensor in the graph of a split module: an input, a result of a stage, or an item of it."""

    name: str
    maker: str
    """Name of the producing stage; empty for an input."""


def analyze_pipeline_module(top: fx.GraphModule) -> PipelineAnalysis:
    """Return ``(stage_id_to_arg_names, stage_id_to_name, liveness)`` of a split module.

    Stages are numbered from 0 in the order of their names. A model input is named after its
    parameter, a stage's result after the stage, and an item of it also by index, as in
    ``submod_1.0``. Weights passed to stages by the top module are left out.

    ``liveness[i]`` begins with the tensors used by stage i, followed by those it only forwards, to
    a later stage or into the result. ``liveness[-1]`` holds the inputs of the model, in order;
    ``liveness[0]`` has the same order if it has the same tensors.

    Raises:
        SpecError: if `top` has no stages, or computes anything outside them.

    """
    names = stage_children(top)
    values = _values(top, names)
    used_by_stage = {
        str(node.target): _used(node, values)
        for node in top.graph.nodes
        if node.op == "call_module" and node.target in names
    }
    liveness: dict[int, list[str]] = {}
    later = _used(top.graph.output_node(), values)
    for stage in reversed(range(len(names))):
        passed_on = [value for value in later if value.maker != names[stage]]
        later = list(dict.fromkeys([*used_by_stage[names[stage]], *passed_on]))
        liveness[stage] = [value.name for value in later]
    inputs = [str(node.target) for node in top.graph.find_nodes(op="placeholder")]
    if set(liveness[0]) == set(inputs):
        liveness[0] = list(inputs)
    return (
        {stage: [value.name for value in used_by_stage[name]] for stage, name in enumerate(names)},
        dict(enumerate(names)),
        {-1: inputs, **{stage: liveness[stage] for stage in range(len(names))}},
    )


def _values(top: fx.GraphModule, names: tuple[str, ...]) -> dict[fx.Node, _Value]:
    """Return the tensors of the nodes in a split module's graph, without weights."""
    values: dict[fx.Node, _Value] = {}
    for node in top.graph.nodes:
        if node.op == "placeholder":
            values[node] = _Value(str(node.target), "")
        elif node.op == "call_module" and node.target in names:
            values[node] = _Value(str(node.target), str(node.target))
        elif node.target is operator.getitem:
            stage_result = values[node.args[0]]
            values[node] = _Value(f"{stage_result.name}.{node.args[1]}", stage_result.maker)
        elif node.op not in {"get_attr", "output"} and node.users:
            raise SpecError(
                f"{node.name} ({node.target}) is computed beside the stages {names[0]} to"
                f" {names[-1]}; put it into one of them"
            )
    return values


def _used(node: fx.Node, values: dict[fx.Node, _Value]) -> list[_Value]:
    """Return the tensors read by `node`, each once, in order."""
    operands: list[fx.Node] = []
    fx.map_arg((node.args, node.kwargs), operands.append)
    return [values[n] for n in dict.fromkeys(operands) if n in values]
