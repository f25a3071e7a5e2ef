"""Find weights with several names, and the stages that must sum a weight's gradient.

A weight used by two stages is in both processes. Each computes part of its gradient, so the stages
must sum these parts before an optimizer step.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from torch import fx, nn

from fxpart.capture.calls import place_in_memory
from fxpart.errors import SpecError
from fxpart.execution.split.graph_module import fetched
from fxpart.execution.stages.chain import Chain, TiedName
from fxpart.execution.stages.flat_graph import stage_children

__all__ = ["TiedGradient", "analyze_tie_weights", "tied_gradient_stages"]


@dataclass(frozen=True, eq=False, slots=True)
class TiedGradient:
    """A weight used by several stages, and its name in each of them."""

    parameter: nn.Parameter
    names: tuple[TiedName, ...]
    """Stages and the weight's name in each, in stage order, each once."""

    @property
    def stages(self) -> tuple[int, ...]:
        """The stages that must sum its gradient, in order."""
        return tuple(stage for stage, _ in self.names)


def analyze_tie_weights(
    top: nn.Module, is_pipeline_partitioned: bool = True
) -> dict[nn.Parameter, set[tuple[str, int]]]:
    """Return the names and stages of each weight that has several names.

    If partitioned, the stages are the children ``submod_<i>`` of `top` or, if there are none, all
    of its children in order. Names are those inside a stage, of which only the first counts. A
    weight used by several stages is tied, even under one name.

    If not partitioned, names are those in `top`, and the stage is 0.

    Raises:
        SpecError: if a partitioned `top` has no children.

    """
    if is_pipeline_partitioned:
        tied = _tied_across(_weights_of_stages(top))
        return {weight: {(name, stage) for stage, name in uses} for weight, uses in tied.items()}
    names: dict[nn.Parameter, list[str]] = {}
    for name, weight in top.named_parameters(remove_duplicate=False):
        names.setdefault(weight, []).append(name)
    return {weight: {(name, 0) for name in have} for weight, have in names.items() if len(have) > 1}


def tied_gradient_stages(stages: Chain | nn.Module) -> tuple[TiedGradient, ...]:
    """Return the weights whose gradient several stages must sum, in order of first use.

    `stages` is a chain, with names as in `StageModule.module`, or a partitioned module as for
    `analyze_tie_weights`. Weights without a gradient are left out.

    Raises:
        SpecError: if a partitioned module has no children.

    """
    if isinstance(stages, Chain):
        weights = [_first_names(stage.module) for stage in stages.stages]
    else:
        weights = _weights_of_stages(stages)
    return tuple(
        TiedGradient(weight, tuple(uses))
        for weight, uses in _tied_across(weights).items()
        if weight.requires_grad
    )


def _tied_across(weights: list[dict[nn.Parameter, str]]) -> dict[nn.Parameter, list[TiedName]]:
    """Return the weights of several stages, with the stages and the first name in each."""
    objects: dict[tuple[object, ...], nn.Parameter] = {}
    uses: dict[nn.Parameter, dict[int, str]] = {}
    for stage, name_of in enumerate(weights):
        for weight, name in name_of.items():
            # Two parameters may share memory.
            first = objects.setdefault(place_in_memory(weight), weight)
            uses.setdefault(first, {}).setdefault(stage, name)
    return {weight: list(names.items()) for weight, names in uses.items() if len(names) > 1}


def _weights_of_stages(top: nn.Module) -> list[dict[nn.Parameter, str]]:
    """Return the weights of each stage of a partitioned module, with their first names."""
    if isinstance(top, fx.GraphModule):
        names = stage_children(top)
        calls = {str(n.target): n for n in top.graph.nodes if n.op == "call_module"}
        return [
            dict(_passed_weights(top, calls[name])) | _first_names(fetched(top, name))
            for name in names
        ]
    children = [_first_names(child) for child in top.children()]
    if not children:
        raise SpecError(
            f"{type(top).__name__} has no children that could be stages; split it first, or ask"
            " with is_pipeline_partitioned=False"
        )
    return children


def _first_names(module: nn.Module) -> dict[nn.Parameter, str]:
    """Return the weights of a module with their first names."""
    return {weight: name for name, weight in module.named_parameters(remove_duplicate=True)}


def _passed_weights(top: fx.GraphModule, call: fx.Node) -> Iterator[tuple[nn.Parameter, str]]:
    """Yield the weights passed by a split module to one of its stages."""
    for operand in call.all_input_nodes:
        if operand.op == "get_attr":
            weight = fetched(top, str(operand.target))
            if isinstance(weight, nn.Parameter):
                yield weight, str(operand.target)
