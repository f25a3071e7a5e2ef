"""`cut_step`: a captured training step as two graphs, its forward and its backward."""

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
    """The two graphs of a training step; their nodes have the ``meta`` of those of the step.

    ``results = forward(*inputs)`` and ``backward(*results[n_results:])`` compute the same as the
    step. `fxpart.get_peak_memory` returns their peak memory.
    """

    forward: fx.GraphModule
    """Takes the inputs of the step; returns a tuple: the loss, then the values in `saved`."""
    backward: fx.GraphModule
    """Takes the values in `saved`; returns a tuple: the gradients, in the order of the step's."""
    saved: tuple[str, ...]
    """Names of the values that the backward needs, the same in both graphs: tensors in the order of
    the forward, inputs of the step first; then numbers, such as symbolic sizes."""
    n_results: int
    """Number of outputs of the forward before these: 1, the loss."""


def cut_step(step: JointCapture | JointProgram) -> ForwardBackward:
    """Return the forward and the backward of `step`, cut where its loss is computed.

    No operator runs twice or in another order, so writes in place keep their meaning. A weight, or
    a view of one, that the backward needs is saved like any value; it takes no further memory.
    Constants of the graph are fetched by either side. O(nodes + edges).
    """
    program = step.program
    specs = program.graph_signature.output_specs
    n_results = sum(spec.kind not in _GRADIENTS for spec in specs)
    outputs = [*program.graph.output_node().args[0]]
    results, gradients = outputs[:n_results], outputs[n_results:]
    before, after = _sides(program.graph)
    read = {operand for node in after for operand in node.all_input_nodes}
    read.update(gradient for gradient in gradients if isinstance(gradient, fx.Node))
    needed = [node for node in before if node in read]
    constants = [node for node in needed if node.op == "get_attr"]
    saved = [node for node in needed if node.op != "get_attr"]
    saved.sort(key=lambda node: isinstance(node.meta.get("val"), _NUMBERS))
    return ForwardBackward(
        _module(program.graph_module, "Forward", [], before, [*results, *saved]),
        _module(program.graph_module, "Backward", saved, [*constants, *after], gradients),
        tuple(node.name for node in saved),
        n_results,
    )


def _sides(graph: fx.Graph) -> tuple[list[fx.Node], list[fx.Node]]:
    """Return the nodes before the first one of the backward, and the others, in order."""
    nodes = [node for node in graph.nodes if node.op != "output"]
    inputs = [node for node in nodes if node.op == "placeholder"]
    others = [node for node in nodes if node.op != "placeholder"]
    starts = (at for at, node in enumerate(others) if node.meta.get(FORWARD) is not None)
    first = next(starts, len(others))
    return inputs + others[:first], others[first:]


def _module(
    root: fx.GraphModule,
    name: str,
    inputs: list[fx.Node],
    nodes: list[fx.Node],
    returned: Sequence[Any],
) -> fx.GraphModule:
    """Return a module that takes the values of `inputs` and computes `nodes`."""
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in inputs:
        copies[node] = graph.placeholder(node.name)
        copies[node].meta = dict(node.meta)
    for node in nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    # A gradient may be None.
    graph.output(tuple(copies[v] if isinstance(v, fx.Node) else v for v in returned))
    return fx.GraphModule(root, graph, name)
