"""Weights that are one under several names, and what that asks of stages that train them.

A weight that two stages use lies in both processes. Each computes a part of its gradient; the sum
of all parts is the gradient, so the stages must exchange them before an optimizer takes a step.
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
    """A weight that several stages use, and how each of them calls it."""

    parameter: nn.Parameter
    names: tuple[TiedName, ...]
    """Stage, and name of the weight in it; in the order of stages, each once."""

    @property
    def stages(self) -> tuple[int, ...]:
        """The stages that must exchange its gradient, in order."""
        return tuple(stage for stage, _ in self.names)


def analyze_tie_weights(
    top: nn.Module, is_pipeline_partitioned: bool = True
) -> dict[nn.Parameter, set[tuple[str, int]]]:
    """Return, for each weight that is one object under several names, its names and stages.

    Partitioned: the stages are the children ``submod_<i>`` of `top`, or where it has none, all of
    its children in order. Names are those inside a stage, and a weight that several stages use is
    tied, also under one name. Names for it inside one stage are not counted, only the first.

    Not partitioned: names are those in `top`, and the stage is 0.

    Raises:
        SpecError: when a partitioned `top` has no children.

    """
    if is_pipeline_partitioned:
        tied = _across(_weights_of_stages(top))
        return {weight: {(name, stage) for stage, name in uses} for weight, uses in tied.items()}
    names: dict[nn.Parameter, list[str]] = {}
    for name, weight in top.named_parameters(remove_duplicate=False):
        names.setdefault(weight, []).append(name)
    return {weight: {(name, 0) for name in have} for weight, have in names.items() if len(have) > 1}


def tied_gradient_stages(stages: Chain | nn.Module) -> tuple[TiedGradient, ...]:
    """Return the weights whose gradient several stages must add up, in the order of first use.

    `stages` is a chain, whose names are those in `StageModule.module`, or a partitioned module as
    for `analyze_tie_weights`. Weights without a gradient are left out.

    Raises:
        SpecError: when a partitioned module has no children.

    """
    if isinstance(stages, Chain):
        weights = [_named(stage.module) for stage in stages.stages]
    else:
        weights = _weights_of_stages(stages)
    return tuple(
        TiedGradient(weight, tuple(uses))
        for weight, uses in _across(weights).items()
        if weight.requires_grad
    )


def _across(weights: list[dict[nn.Parameter, str]]) -> dict[nn.Parameter, list[TiedName]]:
    """Return the weights of more than one stage, with the stage and the first name in it."""
    objects: dict[tuple[object, ...], nn.Parameter] = {}
    uses: dict[nn.Parameter, dict[int, str]] = {}
    for stage, named in enumerate(weights):
        for weight, name in named.items():
            # Two objects may be one weight.
            first = objects.setdefault(place_in_memory(weight), weight)
            uses.setdefault(first, {}).setdefault(stage, name)
    return {weight: list(found.items()) for weight, found in uses.items() if len(found) > 1}


def _weights_of_stages(top: nn.Module) -> list[dict[nn.Parameter, str]]:
    """Return the weights of each stage of a partitioned module, each with its first name there."""
    if isinstance(top, fx.GraphModule):
        names = stage_children(top)
        calls = {str(n.target): n for n in top.graph.nodes if n.op == "call_module"}
        return [dict(_handed_over(top, calls[name])) | _named(fetched(top, name)) for name in names]
    children = [_named(child) for child in top.children()]
    if not children:
        raise SpecError(
            f"{type(top).__name__} has no children that could be stages; split it first, or ask"
            " with is_pipeline_partitioned=False"
        )
    return children


def _named(module: nn.Module) -> dict[nn.Parameter, str]:
    """Return the weights of a module, each with the first of its names."""
    named = module.named_parameters(remove_duplicate=True)
    return {weight: name for name, weight in named}


def _handed_over(top: fx.GraphModule, call: fx.Node) -> Iterator[tuple[nn.Parameter, str]]:
    """Yield the weights that a split module hands to one of its stages."""
    for given in call.all_input_nodes:
        if given.op == "get_attr":
            weight = fetched(top, str(given.target))
            if isinstance(weight, nn.Parameter):
                yield weight, str(given.target)
