"""A captured training step as two graphs, its forward and its backward: `cut_step`."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import SymBool, SymFloat, SymInt, fx
from torch.export.graph_signature import OutputKind

from fxpart.capture.training.joint import JointCapture, JointProgram
from fxpart.capture.training.joint_labels import FORWARD

__all__ = ["ForwardBackward", "cut_step"]

_GRADIENTS = (OutputKind.GRADIENT_TO_PARAMETER, OutputKind.GRADIENT_TO_USER_INPUT)
_NUMBERS = (int, float, bool, SymInt, SymFloat, SymBool)


@dataclass(frozen=True, eq=False, slots=True)
class ForwardBackward:
    """The two graphs of a training step; nodes of both carry the ``meta`` of the whole step's.

    ``results = forward(*inputs)`` and ``backward(*results[n_results:])`` compute what the step
    does. `fxpart.get_peak_memory` says what that takes.
    """

    forward: fx.GraphModule
    """Takes what the step takes; returns a tuple: the loss, then the values in `saved`."""
    backward: fx.GraphModule
    """Takes the values in `saved`; returns a tuple: the gradients, in the order of the step's."""
    saved: tuple[str, ...]
    """Names of the values that the backward needs, the same in both graphs: tensors in the order in
    which the forward has them, inputs of the step first; then numbers, such as symbolic sizes."""
    n_results: int
    """How many outputs of the forward come before those: 1, the loss."""


def cut_step(step: JointCapture | JointProgram) -> ForwardBackward:
    """Return the forward and the backward of `step`, cut where its loss is known.

    No operator is computed twice, and none changes its place: writes in place mean what they did. A
    weight, or a view of one, that the backward needs is saved like any value; it takes no further
    memory. Constants of the graph are fetched by either side. O(nodes + edges).
    """
    program = step.program
    specs = program.graph_signature.output_specs
    n_results = sum(spec.kind not in _GRADIENTS for spec in specs)
    outputs = [*program.graph.output_node().args[0]]
    results, gradients = outputs[:n_results], outputs[n_results:]
    before, after = _sides(program.graph)
    needed = _needed(before, after, gradients)
    constants = [node for node in needed if node.op == "get_attr"]
    saved = _numbers_last([node for node in needed if node.op != "get_attr"])
    return ForwardBackward(
        _module(program.graph_module, "Forward", [], before, [*results, *saved]),
        _module(program.graph_module, "Backward", saved, [*constants, *after], gradients),
        tuple(node.name for node in saved),
        n_results,
    )


def _sides(graph: fx.Graph) -> tuple[list[fx.Node], list[fx.Node]]:
    """Return the nodes before the first one of the backward, and the rest, in order."""
    nodes = [node for node in graph.nodes if node.op != "output"]
    inputs = [node for node in nodes if node.op == "placeholder"]
    others = [node for node in nodes if node.op != "placeholder"]
    starts = (at for at, node in enumerate(others) if node.meta.get(FORWARD) is not None)
    first = next(starts, len(others))
    return inputs + others[:first], others[first:]


def _needed(before: list[fx.Node], after: list[fx.Node], gradients: list[Any]) -> list[fx.Node]:
    """Return the nodes of the forward that the backward reads, or returns, in order."""
    read = {operand for node in after for operand in node.all_input_nodes}
    read.update(gradient for gradient in gradients if isinstance(gradient, fx.Node))
    return [node for node in before if node in read]


def _numbers_last(nodes: list[fx.Node]) -> list[fx.Node]:
    return sorted(nodes, key=lambda node: isinstance(node.meta.get("val"), _NUMBERS))


def _module(
    root: fx.GraphModule,
    name: str,
    taken: list[fx.Node],
    nodes: list[fx.Node],
    returned: Sequence[Any],
) -> fx.GraphModule:
    """Return a module of `nodes`, with inputs that stand for those in `taken`."""
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in taken:
        copies[node] = graph.placeholder(node.name)
        copies[node].meta = dict(node.meta)
    for node in nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    # A gradient may be None: that is returned as it is.
    graph.output(tuple(copies[v] if isinstance(v, fx.Node) else v for v in returned))
    return fx.GraphModule(root, graph, name)
