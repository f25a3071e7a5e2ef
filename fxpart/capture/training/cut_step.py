"""`cut_step`: cut a captured training step into a forward and a backward graph."""

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
    """The two graphs of a training step, whose nodes keep their ``meta``.

    ``results = forward(*inputs)`` and ``backward(*results[n_results:])`` compute the same as the
    step. `fxpart.get_peak_memory` returns their peak memory.
    """

    forward: fx.GraphModule
    """Takes the inputs of the step; returns a tuple: the loss, then the values in `saved`."""
    backward: fx.GraphModule
    """Takes the values in `saved`; returns a tuple: the gradients, in the order of the step's."""
    saved: tuple[str, ...]
    """Names of the values needed by the backward, equal in both graphs: tensors in forward order,
    inputs of the step first; then numbers, such as symbolic sizes."""
    n_results: int
    """Number of outputs of the forward before these: 1, the loss."""


def cut_step(step: JointCapture | JointProgram) -> ForwardBackward:
    """Return the forward and the backward of `step`, cut after its loss.

    No operator runs twice or in another order, so in-place writes keep their meaning. A weight, or
    a view of one, needed by the backward is saved like any value, without taking extra memory.
    Constants of the graph are fetched on both sides. O(nodes + edges).
    """
    program = step.program
    specs = program.graph_signature.output_specs
    n_results = sum(spec.kind not in _GRADIENTS for spec in specs)
    outputs = [*program.graph.output_node().args[0]]
    results, gradients = outputs[:n_results], outputs[n_results:]
    forward_nodes, backward_nodes = _sides(program.graph)
    read = {operand for node in backward_nodes for operand in node.all_input_nodes}
    read.update(gradient for gradient in gradients if isinstance(gradient, fx.Node))
    needed = [node for node in forward_nodes if node in read]
    constants = [node for node in needed if node.op == "get_attr"]
    saved = [node for node in needed if node.op != "get_attr"]
    saved.sort(key=lambda node: isinstance(node.meta.get("val"), _NUMBERS))
    return ForwardBackward(
        _module(program.graph_module, "Forward", [], forward_nodes, [*results, *saved]),
        _module(program.graph_module, "Backward", saved, [*constants, *backward_nodes], gradients),
        tuple(node.name for node in saved),
        n_results,
    )


def _sides(graph: fx.Graph) -> tuple[list[fx.Node], list[fx.Node]]:
    """Return the nodes before the first backward node, and the remaining ones, in order."""
    nodes = [node for node in graph.nodes if node.op != "output"]
    inputs = [node for node in nodes if node.op == "placeholder"]
    computed = [node for node in nodes if node.op != "placeholder"]
    starts = (
        position for position, node in enumerate(computed) if node.meta.get(FORWARD) is not None
    )
    first = next(starts, len(computed))
    return inputs + computed[:first], computed[first:]


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
